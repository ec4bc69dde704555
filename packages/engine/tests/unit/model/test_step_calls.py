"""What one decode step of the demo model asks of the operators: call count bounds batch 1."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from deepinfer_engine.adapters import kernels
from deepinfer_engine.demo import demo_path
from deepinfer_engine.model.runner import build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows

MOST = {21: 78, 300: 81}
"""Cached tokens -> calls of our operators. Narrow operators alone took 188 and 197."""


@pytest.mark.parametrize("start", list(MOST))
def test_decode_step_of_the_demo_model_stays_within_its_operator_calls(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    resolve = kernels.registry.resolve

    def counting(name: str, device: str) -> Any:
        form = resolve(name, device)

        def call(*args: Any) -> Any:
            calls[name] += 1
            return form(*args)

        return call

    monkeypatch.setattr(kernels.registry, "resolve", counting)
    runner = build_runner(demo_path(), num_blocks=8, num_state_slots=2, nextn=0)
    calls.clear()
    runner.model.forward([SequenceRows([7], start, (5, 5, 5), [1, 2, 3], 1)], None)
    print(f"{start} cached tokens: {calls.total()} calls: {dict(calls.most_common())}")
    assert calls.total() <= MOST[start]
