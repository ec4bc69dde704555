"""CPU time of the scheduling policy for one decode step, against the step it must hide under.

    python packages/engine/benches/bench_scheduler.py [sequences]

No model runs: the outputs are made up. Prints the median of one plan + absorb + settle on this
machine, and what share of a 10 ms device step that is.
"""

from __future__ import annotations

import sys
import time

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.runner import Caps, StepOutput
from deepinfer_engine.core.scheduler import Scheduler
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.types import GenerateRequest, SamplingParams
from deepinfer_engine.core.windows import NOTHING

DEVICE_STEP_MS = 10.0
STEPS = 400
NEXTN = 5


class NoParking:
    def park(self, seq: LiveSequence) -> bool:
        return False

    def resume(self, seq: LiveSequence) -> None:
        raise RuntimeError("nothing is parked")

    def drop(self, seq: LiveSequence) -> None:
        raise RuntimeError("nothing is parked")


def main() -> None:
    sequences = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    caps = Caps(129_280, 1 << 20, NEXTN, 3, (1,), 64 * sequences, 2 * sequences + 1)
    config = EngineConfig(
        max_num_seqs=sequences, max_num_batched_tokens=1 << 20, max_queue=sequences
    )
    scheduler = Scheduler(caps, 128, config, "both", NoParking(), keep_snapshots=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
    for i in range(sequences):
        request = GenerateRequest(f"r{i}", tuple(range(1, 500 + i)), sampling)
        scheduler.add(LiveSequence(request, request.request_id, 0.0))
    for seq in scheduler.admit(0.0):
        scheduler.ready(seq, NOTHING)
    times: list[float] = []
    for step in range(STEPS):
        began = time.perf_counter()
        plan = scheduler.plan(float(step))
        planned = time.perf_counter() - began
        assert plan is not None
        outputs = [StepOutput((7,)) for _ in plan.chunks]
        outputs += [StepOutput((7,) * 4, NEXTN, 3) for _ in plan.rows]
        began = time.perf_counter()
        scheduler.absorb(plan, outputs)
        scheduler.settle(plan)
        if not plan.chunks:
            times.append(1e3 * (planned + time.perf_counter() - began))
    scheduler.pools.audit()
    times.sort()
    median, least, p99 = (times[int(q * len(times))] for q in (0.5, 0.1, 0.99))
    print(f"{sequences} sequences, nextn {NEXTN}, {len(times)} decode steps")
    print(
        f"plan + absorb + settle: median {median:.3f} ms, 10th percentile {least:.3f}, "
        f"99th {p99:.3f}"
    )
    print(f"share of a {DEVICE_STEP_MS:.0f} ms device step: {median / DEVICE_STEP_MS:.3f}")


if __name__ == "__main__":
    main()
