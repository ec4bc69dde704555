"""A plan in the making, off the step thread, and how a group learns of it.

Rank 0 plans and judges; the others only ask. Nobody waits: a plan that is not there yet is asked
for again some steps later. Whatever the planner does (raise, run out of memory, never end), the
placement in force stays and the group hears of it at the same step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from deepinfer_eplb.errors import EplbError
from deepinfer_eplb.placement import maps_of
from deepinfer_eplb.planning.planner import Plan
from deepinfer_eplb.rearrange.transport import Transport

PENDING: Final = 1
READY: Final = 2
FAILED: Final = 3


def in_thread(run: Callable[[], None]) -> None:
    """Run in a thread that neither `close` nor the end of the process waits for."""
    threading.Thread(target=run, name="eplb-plan", daemon=True).start()


class PlanTask:
    """A call of `make` in the background, and what came of it."""

    def __init__(
        self,
        make: Callable[[], tuple[Plan, bool]],
        background: Callable[[Callable[[], None]], Any],
    ) -> None:
        self._make = make
        self._done = threading.Event()
        self.result: tuple[Plan, bool] | None = None
        self.error: BaseException | None = None
        try:
            background(self._run)
        except Exception as e:
            self.error = e
            self._done.set()

    def _run(self) -> None:
        try:
            self.result = self._make()
        except BaseException as e:
            self.error = e
        self._done.set()

    @property
    def state(self) -> int:
        if not self._done.is_set():
            return PENDING
        return FAILED if self.error is not None else READY


def ask(task: PlanTask | None, transport: Transport) -> int:
    """Collective: the state of rank 0's plan. task: None on the other ranks."""
    state = np.array([0 if task is None else task.state], dtype=np.int64)
    return int(transport.all_reduce_sum(state)[0])


def share(
    task: PlanTask | None, transport: Transport, shape: tuple[int, ...], experts: int, gpus: int
) -> tuple[Plan, bool]:
    """Collective: rank 0's finished plan and whether it is worth its move; shape: (L, S).

    One all-reduce, to which the other ranks add zeros. Raises PlanError on every rank alike if what
    the planner made is no placement.
    """
    L, S = shape
    message = np.zeros(7 + L * S, dtype=np.int64)
    if task is not None:
        if task.result is None:
            raise EplbError("a plan is shared only when it is there")
        made, worth = task.result
        old_B = np.nan if made.old_B is None else made.old_B
        figures = np.array([made.predicted_B, old_B, made.moved, made.seconds])
        message[0] = worth
        message[1:5] = figures.view(np.int64)
        message[5:7] = made.swaps, made.replica_moves
        message[7:] = made.phy2log.ravel()
    message = transport.all_reduce_sum(message)
    predicted, old_B, moved, seconds = message[1:5].copy().view(np.float64).tolist()
    phy2log = message[7:].reshape(L, S).astype(np.int32)
    log2phy, logcnt = maps_of(phy2log, experts)
    made = Plan(
        phy2log=phy2log,
        log2phy=log2phy,
        logcnt=logcnt,
        num_gpus=gpus,
        predicted_B=predicted,
        old_B=None if np.isnan(old_B) else old_B,
        moved=moved,
        swaps=int(message[5]),
        replica_moves=int(message[6]),
        seconds=seconds,
    )
    return made, bool(message[0])
