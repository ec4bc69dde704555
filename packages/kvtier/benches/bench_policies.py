"""Hit rates of eviction policies on a trace, served by a real cache, beside the simulator's.

    python benches/bench_policies.py conversation_trace.jsonl synthetic_trace.jsonl

Without a trace: a quarter of a day of synthetic load. The ceiling is the simulator's oracle, which
knows the future. Processor time a request is that of match, load and put together, blocks of 64
bytes, so that policies differ and copying does not matter.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.host.policies import ONLINE
from deepinfer_kvtier.simulation.replay import BLOCK_BYTES, ReplayClock, ReplayResult, replay
from deepinfer_kvtier.simulation.simulate import simulate
from deepinfer_kvtier.simulation.stretch import StretchLoad, generate
from deepinfer_kvtier.simulation.trace import Request, read_trace


def serve(requests: list[Request], capacity: int, policy: str) -> ReplayResult:
    clock = ReplayClock()
    settings = {"host_bytes": capacity * BLOCK_BYTES, "host_policy": policy}
    with kvtier.open(clock=clock, **settings) as cache:
        return replay(cache, clock, requests)


def compare(name: str, requests: list[Request], capacity: int) -> None:
    oracle = simulate(requests, capacity_blocks=capacity, policy="oracle", as_host=True).hit_rate
    print(f"{name}, {len(requests):,} requests, {capacity:,} blocks; oracle {oracle:.4f}")
    for policy in ONLINE:
        served = serve(requests, capacity, policy)
        simulated = simulate(requests, capacity_blocks=capacity, policy=policy, as_host=True)
        share = served.hit_rate / oracle if oracle else 1.0
        calls = ", ".join(f"{call} {us:.0f}" for call, us in served.cpu_us.items())
        print(
            f"  {policy:<9} hit rate {served.hit_rate:.4f}  of oracle {share:.2f}"
            f"  simulator {simulated.hit_rate:.4f}  cpu {sum(served.cpu_us.values()):.0f} us"
            f" a request ({calls})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--capacity", type=int, nargs="*", default=[10_000])
    arguments = parser.parse_args()
    loads = {path.name: read_trace(path) for path in arguments.traces}
    if not loads:
        loads["synthetic load"] = generate(StretchLoad(days=0.25, sessions_per_day=4_000))
    for name, requests in loads.items():
        for capacity in arguments.capacity:
            compare(name, requests, capacity)


if __name__ == "__main__":
    main()
