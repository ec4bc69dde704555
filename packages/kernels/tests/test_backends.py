"""Every back end against the reference, and the reference against itself in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from deepinfer_kernels.capability import capability
from deepinfer_kernels.draw import seeded, size
from deepinfer_kernels.registry import default_registry
from deepinfer_kernels.testing import DTYPES, check_impl, check_twin

CHECKS = [
    pytest.param(name, backend, id=f"{name}-{backend}")
    for name in default_registry.op_names()
    for backend, impl in default_registry.impls(name).items()
    if backend != "reference"
    and impl.requires.refusal(capability("cpu")) is None
    and impl.unavailable() is None
]
TWINS = [name for name in default_registry.op_names() if default_registry.spec(name).twin]
SEEDS = st.integers(0, 2**32)


def test_native_forms_are_built_or_their_absence_is_said() -> None:
    forms = [default_registry.impls(name).get("native") for name in default_registry.op_names()]
    reasons = {form.unavailable() for form in forms if form is not None}
    if reasons != {None}:
        pytest.skip(f"native forms are not tested here: the back end {reasons}")


@pytest.mark.parametrize(("name", "backend"), CHECKS)
@example(seed=0)
@given(seed=SEEDS)
def test_back_end_agrees_with_the_reference(name: str, backend: str, seed: int) -> None:
    spec = default_registry.spec(name)
    fn = default_registry.impls(name)[backend].fn
    for dtype in DTYPES:
        found = check_impl(spec, fn, seed, dtype)
        assert found.excess <= 1, found


ATTENTION = {"mla_sparse", "mla_decode_sparse", "gqa_attention"}
"""Their reference takes weights of keys that are infinite from a sum that is not a number."""


@pytest.mark.parametrize(("name", "backend"), [c for c in CHECKS if c.values[0] not in ATTENTION])
@given(seed=SEEDS)
def test_a_value_that_is_not_finite_gives_what_the_reference_gives(
    name: str, backend: str, seed: int
) -> None:
    spec = default_registry.spec(name)

    def cases(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        args = list(spec.cases(g, dtype))
        places = [
            i
            for i, arg in enumerate(args)
            if isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.numel()
        ]
        if places:
            g = seeded(seed)
            place = places[size(g, 0, len(places) - 1)]
            values = args[place].clone()
            wrong = (math.nan, math.inf, -math.inf)[size(g, 0, 2)]
            values.view(-1)[size(g, 0, values.numel() - 1)] = wrong
            args[place] = values
        return tuple(args)

    fn = default_registry.impls(name)[backend].fn
    for dtype in DTYPES:
        found = check_impl(replace(spec, cases=cases), fn, seed, dtype)
        assert found.excess <= 1, found


@pytest.mark.parametrize("name", TWINS)
@given(seed=SEEDS)
def test_reference_agrees_with_its_float64_twin(name: str, seed: int) -> None:
    spec = default_registry.spec(name)
    for dtype in (torch.float32, torch.bfloat16):
        found = check_twin(spec, seed, dtype)
        assert found.excess <= 1, found
