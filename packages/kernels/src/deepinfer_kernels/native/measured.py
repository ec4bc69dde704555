"""On a machine without AVX2: which C++ forms are worth taking there.

They are compiled for such machines without vector instructions to speak of, while torch chooses its
own at run time. Which of the two is faster differs by operator, so it is measured, once a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from deepinfer_kernels.native.library import level, unavailable
from deepinfer_kernels.registry import Kernel, default_registry

__all__ = ["best_time", "refusal"]

ROUNDS = 5


def best_time(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of a few calls, after one that does not count."""
    call()
    times: list[float] = []
    for _ in range(ROUNDS):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


@cache
def refusal(op: str) -> str | None:
    """Why the C++ form of an operator is not to be taken here, or None."""
    reason = unavailable()
    if reason is not None or level() != "base":
        return reason
    impls = default_registry.impls(op)
    args = next(iter(default_registry.spec(op).shapes(torch.float32).values()))

    def seconds(fn: Kernel) -> float:
        with torch.inference_mode():
            return best_time(lambda: fn(*args))

    own = seconds(impls["native"].fn)
    other = "cpu" if "cpu" in impls else "reference"
    torch_form = seconds(impls[other].fn)
    if own <= torch_form:
        return None
    times = f"{own * 1e6:.0f} us against {torch_form * 1e6:.0f} us"
    return f"is slower than {other} on this machine, which has no AVX2 ({times})"
