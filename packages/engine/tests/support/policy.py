"""The scheduler alone: no runner, outputs made up by the test."""

from __future__ import annotations

from toy_engine import prompt, request

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.runner import Caps, StepOutput
from deepinfer_engine.core.scheduler import Scheduler
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.core.windows import NOTHING

BLOCK = 16


class NoParking:
    def park(self, seq):
        return False

    def resume(self, seq):
        raise AssertionError("nothing was parked")

    def drop(self, seq):
        raise AssertionError("nothing was parked")


def scheduler(role="both", *, blocks=40, slots=20, nextn=2, keep_snapshots=False, **config):
    caps = Caps(
        vocab_size=256,
        max_model_len=4096,
        nextn=nextn,
        lookback=2,
        eos_token_ids=(255,),
        num_blocks=blocks,
        num_state_slots=slots,
    )
    return Scheduler(caps, BLOCK, EngineConfig(**config), role, NoParking(), keep_snapshots)


def add(s, name, length, *, now=0.0, max_tokens=1000, priority=0, seed=None, **options):
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, priority=priority
    )
    # Equal prompts would be forks of one.
    tokens = prompt(int.from_bytes(name.encode()) % (1 << 32) if seed is None else seed, length)
    seq = LiveSequence(request(name, tokens, sampling, **options), name, now)
    s.add(seq)
    return seq


def turn(s, now=0.0, emit=1):
    """One step; every sampling sequence emits `emit` tokens at most (one at prefill)."""
    for seq in s.admit(now):
        s.ready(seq, NOTHING)
    s.fork()
    plan = s.plan(now)
    if plan is None:
        return None, []
    s.absorb(plan, made_up(plan, emit))
    return plan, s.settle(plan)


def made_up(plan, emit=1):
    outputs = [StepOutput((1,)) if c.sample else None for c in plan.chunks]
    return outputs + [
        StepOutput((1,) * min(emit, drafts + 1), drafts, min(emit, drafts + 1) - 1)
        for _, drafts in plan.rows
    ]


def kind(plan):
    return "prefill" if not plan.rows else "mixed" if plan.chunks else "decode"
