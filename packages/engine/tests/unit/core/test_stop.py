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


@given(nextn=st.integers(0, 7), total=st.integers(1, 40), most=st.integers(2, 41))
def test_drafts_plus_one_token_never_pass_a_limit(nextn, total, most):
    room = draft_room(nextn, total, most)
    assert 0 <= room <= nextn
    assert room == nextn or total + room + 1 >= most, "no less than there is room for"
    if total < most:
        assert total + room + 1 <= most
