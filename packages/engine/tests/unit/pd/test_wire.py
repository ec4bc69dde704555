"""Frames and bodies: what is written is read back, what is wrong is a TransferError."""

from __future__ import annotations

import dataclasses
import re
import struct
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.core.types import GenerateRequest, SamplingParams, TokenLogprob, Usage
from deepinfer_engine.core.windows import Prefix, WindowSource
from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd import messages, quoting, schema, wire
from deepinfer_engine.pd.wire import FrameType, UnitHeader, Xid

U16, U32, U64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
LOGPROBS = st.lists(
    st.builds(
        TokenLogprob,
        st.integers(0, 1000),
        st.floats(-100, 0),
        st.lists(st.tuples(st.integers(0, 1000), st.floats(-100, 0)), max_size=3).map(tuple),
    ),
    max_size=3,
).map(tuple)


def test_a_frame_header_is_sixteen_bytes_in_the_order_of_the_protocol():
    assert wire.pack_frame(FrameType.TOKENS, 7, 258) == struct.pack(
        "<IBBHQ", 258, 40, wire.VERSION, 0, 7
    )


def test_a_unit_header_is_sixty_four_bytes_in_the_order_of_the_protocol():
    header = UnitHeader(1, 2, 3, 4, 5, 6, 7, 8, 0, 10)
    assert header.pack() == struct.pack("<QHHIIIIIQQI12x", 1, 2, 3, 4, 5, 6, 7, 8, 0, 10, 0)
    assert len(header.pack()) == 64


@given(U64, U16, U16, U32, U32, U32, U32, U32, st.integers(0, 100), U64)
def test_a_unit_header_survives_the_wire(g, a, group, unit, b0, bn, t0, tn, nbytes, digest):
    header = UnitHeader(g, a, group, unit, b0, bn, t0, tn, nbytes, digest)
    assert UnitHeader.unpack(memoryview(header.pack() + bytes(nbytes))) == header


def test_a_truncated_unit_is_refused():
    body = UnitHeader(1, 2, 0, 4, 5, 6, 7, 8, 100, 10).pack() + bytes(100)
    for cut in (10, 63, 64, 163):
        with pytest.raises(TransferError):
            UnitHeader.unpack(memoryview(body[:cut]))


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (struct.pack("<IBBHQ", 5, 40, wire.VERSION + 1, 0, 0), "version"),
        (struct.pack("<IBBHQ", 5, 40, wire.VERSION, 2, 0), "unknown flags"),
        (struct.pack("<IBBHQ", 5, 40, wire.VERSION, 0, 1), "expected frame 0"),
        (struct.pack("<IBBHQ", (16 << 20) + 1, 40, wire.VERSION, 0, 0), "at most"),
        (struct.pack("<IBBHQ", (8 << 20) + 81, 30, wire.VERSION, 0, 0), "at most"),
        (struct.pack("<IBBHQ", (64 << 10) + 1, 1, wire.VERSION, 0, 0), "at most"),
        (struct.pack("<IBBHQ", 2**32 - 1, 200, wire.VERSION, 0, 0), "at most"),
    ],
)
def test_a_frame_that_breaks_the_protocol_is_refused_before_its_body_is_read(header, what):
    with pytest.raises(TransferError, match=what):
        wire.unpack_frame(header, 0)


@given(st.binary(max_size=200))
def test_garbage_in_a_body_is_a_transfer_error_and_nothing_else(data):
    try:
        body = wire.unpack_body(data)
    except TransferError:
        return
    for read in (
        messages.read_xid,
        messages.read_usage,
        lambda b: messages.read_request(b, Xid("r", 1), ()),
        lambda b: messages.read_logprobs(b["logprobs"]),
    ):
        try:
            messages.reading(read, body)
        except TransferError:
            continue


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_k=st.integers(-1, 50),
        seed=st.integers(0, 2**63 - 1),
        max_tokens=st.integers(1, 100),
        stop_token_ids=st.lists(st.integers(0, 99), max_size=4).map(tuple),
        logit_bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 100)), max_size=3).map(
            tuple
        ),
        logprobs=st.none() | st.integers(0, 20),
        ignore_eos=st.booleans(),
    ),
    st.text(max_size=20),
    st.sampled_from(["agent", "chat", "scratch"]),
    st.lists(st.integers(0, 2**31 - 1), max_size=30),
)
def test_a_request_survives_the_wire(sampling, salt, traffic_class, tokens):
    request = GenerateRequest("r", tuple(tokens), sampling, salt, traffic_class)
    body = wire.unpack_body(wire.pack_body(messages.request_body(request)))
    again = messages.unpack_tokens(messages.pack_tokens(tokens))
    assert messages.read_request(body, Xid("r", 1), again) == request


@given(LOGPROBS, st.integers(0, 9), st.integers(0, 9))
def test_logprobs_and_usage_survive_the_wire(logprobs, a, b):
    body = wire.unpack_body(
        wire.pack_body(
            {
                "logprobs": messages.logprobs_body(logprobs),
                "usage": messages.usage_body(Usage(a, b, a, b, a)),
            }
        )
    )
    assert messages.read_logprobs(body["logprobs"]) == logprobs
    assert messages.read_usage(body["usage"]) == Usage(a, b, a, b, a)


@given(st.integers(0, 900), st.integers(0, 900), st.integers(0, 127))
def test_what_the_cache_held_survives_the_wire(a, b, generation):
    for window in (None, *get_args(WindowSource)):
        prefix = Prefix(max(a, b), min(a, b), window, generation)
        body = wire.unpack_body(wire.pack_body(messages.cached_body(prefix)))
        assert messages.read_cached(body) == prefix
    assert set(get_args(schema.Window)) == set(get_args(WindowSource))


def reserve_body(**changes):
    request = GenerateRequest("r", (), SamplingParams(seed=1))
    body = {
        **messages.xid_body(Xid("r", 1)),
        **messages.request_body(request),
        "epoch": 1,
        "prompt_len": 3,
        "layout_hash": "h",
    }
    return wire.unpack_body(wire.pack_body({**body, **changes}))


def test_a_field_that_this_version_does_not_know_is_an_error_and_never_dropped():
    schema.check(FrameType.RESERVE, reserve_body())
    sampling = reserve_body()["sampling"]
    for body, field in (
        (reserve_body(more=2), "more"),
        (reserve_body(sampling={**sampling, "top_n_sigma": 0.5}), "sampling.top_n_sigma"),
        (reserve_body(sampling={k: sampling[k] for k in sampling if k != "min_p"}), "min_p"),
        (reserve_body(sampling={**sampling, "temperature": "x"}), "temperature"),
        (reserve_body(sampling={**sampling, "temperature": float("nan")}), "temperature"),
        (reserve_body(sampling={**sampling, "logit_bias": [[1]]}), "logit_bias"),
        (reserve_body(sampling={**sampling, "seed": True}), "seed"),
        (reserve_body(prompt_len=-1), "prompt_len"),
        (reserve_body(traffic_class="vip"), "traffic_class"),
    ):
        with pytest.raises(schema.BadMessage, match=re.escape(field)) as refused:
            schema.check(FrameType.RESERVE, body)
        assert refused.value.xid == Xid("r", 1)


def test_every_message_type_has_a_schema_and_sampling_is_carried_whole():
    assert set(FrameType) - set(schema.MESSAGES) == {FrameType.UNIT, FrameType.UNIT_AT}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(schema.Sampling.model_fields) == fields
    assert set(schema.Usage.model_fields) == {f.name for f in dataclasses.fields(Usage)}


def test_what_a_peer_wrote_stands_in_a_log_as_one_harmless_line():
    assert quoting.quoted("a\nb\x1b[31m\u202e") == "a\\nb\\x1b[31m\\u202e"
    assert len(quoting.quoted("x" * 10_000)) == 303


@given(st.lists(st.tuples(U32, U64), max_size=6, unique_by=lambda u: u[0]), st.randoms())
def test_the_combined_digest_does_not_depend_on_order_but_on_every_unit(units, random):
    def combined(some):
        total = 0
        for unit, digest in some:
            total = wire.add_to_combined(total, unit, digest)
        return total

    shuffled = list(units)
    random.shuffle(shuffled)
    assert combined(units) == combined(shuffled)
    if units:
        assert combined(units) != combined(units[1:])
        (unit, digest), *rest = units
        assert combined([(unit, digest ^ 1), *rest]) != combined(units)
