"""Sampling parameters at the ends of their ranges."""

from __future__ import annotations

import pytest

from deepinfer_engine.core.sampling_params import validate
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.errors import RequestError
from deepinfer_engine.model.sampling import sampling_batch


@pytest.mark.parametrize("cold", [0.0, 5e-324, 1e-40, 9e-6])
def test_a_temperature_next_to_zero_is_zero(cold):
    params = [SamplingParams(temperature=cold), SamplingParams(temperature=0.1)]
    batch = sampling_batch(params, [[1], [1]], [1, 1], 0)
    assert batch.temperature.tolist() == [0.0, 0.1]


@pytest.mark.parametrize("field", [{"top_k": 2**63}, {"repetition_penalty": 1e-300}])
def test_what_arrays_cannot_hold_or_divide_by_is_refused(field):
    with pytest.raises(RequestError, match=next(iter(field))):
        validate(SamplingParams(**field), 100)


@pytest.mark.parametrize("field", [{"top_k": 2**63 - 1}, {"repetition_penalty": 0.01}])
def test_the_last_value_in_range_is_taken(field):
    params = SamplingParams(**field)
    validate(params, 100)
    sampling_batch([params], [[1]], [1], 0)
