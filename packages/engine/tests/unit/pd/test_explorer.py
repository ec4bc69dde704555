"""The transfer protocol in every order of events, and that a guard less would be noticed.

Each mutation takes one guard out of `pd/landing.py`; the explorer has to find a path that shows it.
Where several guards stand behind one another, it is the first one's absence that is found.
"""

from __future__ import annotations

import inspect
import sys
import types

import pytest
from protocol_explorer import Found, explore

from deepinfer_engine.pd import landing

SOURCE = inspect.getsource(landing)


def test_one_request_with_any_accident_at_any_moment():
    states, ends = explore(requests=1, accidents=1)
    assert states > 1000
    assert ends > 5


def test_two_requests_of_three_units_in_any_order():
    states, ends = explore(requests=2, accidents=0)
    assert states > 100
    assert ends == 1


@pytest.mark.slow
@pytest.mark.parametrize(("requests", "accidents"), [(2, 1), (1, 2)])
def test_two_requests_of_three_units_with_accidents(requests, accidents):
    """I-38, I-39: tens of thousands of worlds; `nox -s explorer`."""
    states, ends = explore(requests=requests, accidents=accidents)
    assert states > 10_000
    assert ends > 10


MUTATIONS = {
    "a damaged unit counts": (
        "if wire.unit_digest(self._views(attempt, header)) != header.digest:",
        "if False:",
    ),
    "a unit with another attempt's number is taken": (
        "if attempt is None or attempt.xid.attempt != header.attempt:",
        "if attempt is None:",
    ),
    "a unit is written for an attempt that was given up": (
        "  if attempt.stage is Stage.ABORTING:\n            return None\n        if attempt.writer",
        "  if attempt.writer",
    ),
    "anybody writes": (
        "if attempt.writer is not None and attempt.writer is not writer:\n            raise "
        'TransferError(f"{attempt.xid.key} is written',
        'if False:\n            raise TransferError(f"{attempt.xid.key} is written',
    ),
    "blocks are written twice": (
        "if not attempt.blocks_written.isdisjoint(range(first, end)):",
        "if False:",
    ),
    "the state is written twice": (
        "if any(first < b and a < end for a, b in attempt.state_ranges):",
        "if False:",
    ),
    "blocks that were not reserved are written": (
        "if not (0 <= first < end <= len(attempt.reservation.blocks)) or (",
        "if (",
    ),
    "a unit for other tokens is taken": (
        "or (header.token_first, header.token_count) != (first * size, tokens)",
        "",
    ),
    "a unit of no kind is taken": (
        'raise TransferError(f"unit {header.unit} of {key} has unknown group {header.group}")',
        "return",
    ),
    "a commit revives what was given up": (
        "not attempt.writer_owns or attempt.stage is Stage.ABORTING:\n            return None",
        "not attempt.writer_owns:\n            return None",
    ),
    "a commit counts after its grant has ended": (
        "if attempt is None or not attempt.writer_owns or attempt.stage",
        "if attempt is None or attempt.stage",
    ),
    "anybody commits": (
        "if attempt.writer is not None and attempt.writer is not writer:\n            raise "
        'TransferError(f"{xid.key} is committed',
        'if False:\n            raise TransferError(f"{xid.key} is committed',
    ),
    "a second, other commit is taken": ("if attempt.commit != commit:", "if False:"),
    "a commit of another length is taken": (
        "if len(commit.tokens) != attempt.reservation.prompt_len:",
        "if False:",
    ),
    "a commit whose prompt was all cached is taken": (
        "if not commit.prefix.n_tokens < len(commit.tokens):",
        "if False:",
    ),
    "ready without all units": ("if attempt.units_seen == commit.n_units:", "if True:"),
    "ready with another sum": (
        "(attempt.combined != commit.digest or not self._covered(attempt))",
        "(not self._covered(attempt))",
    ),
    "ready without all bytes": (
        "(attempt.combined != commit.digest or not self._covered(attempt))",
        "(attempt.combined != commit.digest)",
    ),
    "memory is not held for the writer": (
        "        self._loop.pin(reservation.blocks, reservation.state_slot)\n",
        "",
    ),
    "an attempt is forgotten while its writer may write": (
        "if attempt.stage is Stage.ABORTING and not attempt.writer_owns:",
        "if attempt.stage is Stage.ABORTING:",
    ),
    "the request's own share is not given back": (
        "            self._loop.cancel(attempt.reservation)\n",
        "",
    ),
    "the writer's share is not given back": (
        "self._loop.unpin(attempt.reservation.blocks, attempt.reservation.state_slot)",
        "pass",
    ),
    "a grant outlives its end": ("            del self._by_grant[attempt.grant_id]\n", ""),
    "what is not ready runs": ("if attempt.stage is not Stage.READY:", "if False:"),
    "what runs is aborted below its sequence": (
        "if attempt.stage in (Stage.RUNNING, Stage.DONE, Stage.GONE):",
        "if False:",
    ),
    "an attempt has two reservations": ("if xid.key in self._by_key:", "if False:"),
}


def walk(module):
    for accidents in (1, 2):
        explore(module, requests=1, accidents=accidents)


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_a_guard_less_is_found(name):
    guard, instead = MUTATIONS[name]
    assert SOURCE.count(guard) == 1, f"{name}: the guard is not in landing.py as it stands here"
    module = types.ModuleType("mutated_landing")
    sys.modules[module.__name__] = module  # where dataclasses look their annotations up
    try:
        exec(compile(SOURCE.replace(guard, instead), "landing.py", "exec"), module.__dict__)
        with pytest.raises(Found):
            walk(module)
    finally:
        del sys.modules[module.__name__]
