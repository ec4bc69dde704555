"""Operators are chosen when a model is built, from the registry as it is then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from deepinfer_engine import LLM, SamplingParams
from deepinfer_kernels.capability import Requirement
from deepinfer_kernels.registry import Impl, default_registry

GREEDY = SamplingParams(temperature=0, max_tokens=3)
calls: list[int] = []


def _counting(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    calls.append(1)
    return default_registry.spec("rms_norm").reference(x, weight, eps)


@pytest.fixture(autouse=True)
def counting_form() -> Iterator[None]:
    """A form of the caller's own, registered after the engine was imported."""
    calls.clear()
    if "counting" not in default_registry.impls("rms_norm"):
        on_cpu = Requirement(frozenset({"cpu"}))
        default_registry.add_impl(Impl("rms_norm", "counting", _counting, on_cpu))
    yield
    calls.clear()


def test_form_chosen_after_an_earlier_model_was_built_is_used_by_the_next() -> None:
    LLM().close()
    with default_registry.use(backend="counting", op="rms_norm"), LLM() as llm:
        llm.generate("Ana lived", GREEDY)
    assert calls


def test_model_keeps_the_forms_it_was_built_with() -> None:
    with LLM() as plain:
        with default_registry.use(backend="counting", op="rms_norm"):
            other = LLM()
            plain.generate("Ana lived", GREEDY)
            assert not calls, "a model built before the choice follows it"
        with other:
            other.generate("Ana lived", GREEDY)
    assert calls, "a model built under the choice lost it"
