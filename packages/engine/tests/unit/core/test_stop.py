"""Where a sequence ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.core.stop import cut_at_stop, draft_room
from deepinfer_engine.core.types import SamplingParams

EOS = 9


def cut(emitted, *, output_len=0, total_len=10, max_model_len=100, **sampling):
    return cut_at_stop(
        emitted,
        output_len=output_len,
        total_len=total_len,
        sampling=SamplingParams(**sampling),
        eos_token_ids=(EOS,),
        max_model_len=max_model_len,
    )


@pytest.mark.parametrize(
    ("emitted", "options", "expected"),
    [
        ([1, 2, 3], {}, (3, None)),
        ([1, EOS, 3], {}, (2, "stop")),
        ([1, EOS, 3], {"ignore_eos": True}, (3, None)),
        ([1, 7, 3], {"stop_token_ids": (7,)}, (2, "stop")),
        ([1, 2, 3], {"max_tokens": 2}, (2, "length")),
        ([1, EOS], {"max_tokens": 2}, (2, "stop")),
        ([1, 2, EOS], {"max_tokens": 2}, (2, "length")),
        ([1, 2, 3], {"total_len": 98}, (2, "length")),
        ([EOS, 2, EOS], {"min_tokens": 1}, (3, "stop")),
        ([EOS], {"min_tokens": 1}, (1, None)),
    ],
)
def test_a_step_is_cut_after_the_first_token_that_ends_it(emitted, options, expected):
    assert cut(emitted, **options) == expected


@given(
    nextn=st.integers(0, 7),
    output_len=st.integers(0, 20),
    total_len=st.integers(1, 40),
    max_tokens=st.integers(1, 21),
    max_model_len=st.integers(2, 41),
)
def test_drafts_plus_one_token_never_pass_a_limit(
    nextn, output_len, total_len, max_tokens, max_model_len
):
    room = draft_room(
        nextn=nextn,
        output_len=output_len,
        total_len=total_len,
        sampling=SamplingParams(max_tokens=max_tokens),
        max_model_len=max_model_len,
    )
    assert 0 <= room <= nextn
    if output_len < max_tokens and total_len < max_model_len:
        assert output_len + room + 1 <= max_tokens
        assert total_len + room + 1 <= max_model_len
