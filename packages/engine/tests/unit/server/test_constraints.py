"""What a request promises about its answer, on its way to the engine and back as an error."""

from __future__ import annotations

import json

import pytest
from server_fakes import byte_codec

from deepinfer_engine.codec.errors import InvalidRequest, wire_error
from deepinfer_engine.errors import ConstraintError, ConstraintsUnavailable, SchemaTooComplex

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "t", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "t", "parameters": SCHEMA, "strict": True}}


def sampling(**fields):
    body = {"model": "toy", "messages": [{"role": "user", "content": "json"}], **fields}
    return byte_codec().prepare("chat", json.dumps(body).encode(), 4096).sampling


def test_a_request_that_asks_for_nothing_is_not_constrained():
    assert sampling().constraint is None
    assert sampling(tools=[TOOL], tool_choice="none").constraint is None


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"response_format": FORMAT}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "regex", "regex": "a+"}}, True),
        ({"tools": [STRICT]}, True),
        ({"tools": [TOOL]}, False),
    ],
)
def test_a_format_is_a_promise_and_a_tool_that_is_not_strict_is_none(fields, needed):
    constraint = sampling(**fields).constraint
    assert json.loads(constraint.grammar)["type"] == "structural_tag"
    assert constraint.needed is needed


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 4}])
def test_what_would_write_beyond_the_end_of_a_format_is_refused(field):
    with pytest.raises(InvalidRequest) as refused:
        sampling(response_format=FORMAT, **field)
    assert refused.value.param == next(iter(field))
    assert sampling(tools=[TOOL], **field).constraint is None


def test_a_schema_that_contradicts_itself_names_the_field():
    schema = {"allOf": [{"type": "string"}, {"type": "null"}]}
    with pytest.raises(ConstraintError) as refused:
        sampling(
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        )
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    ("error", "chat", "messages"),
    [
        (
            SchemaTooComplex("slow", param="tools"),
            (400, "schema_too_complex"),
            (400, "invalid_request_error"),
        ),
        (
            ConstraintError("bad", param="tools"),
            (400, "invalid_value"),
            (400, "invalid_request_error"),
        ),
        (ConstraintsUnavailable("no xgrammar"), (501, "not_implemented"), (501, "api_error")),
    ],
)
def test_errors_of_constraints_have_rows_of_their_own(error, chat, messages):
    told = wire_error(error, "chat", "r")
    assert (told.status, told.body["error"]["code"]) == chat
    assert told.body["error"]["param"] == getattr(error, "param", None)
    told = wire_error(error, "messages", "r")
    assert (told.status, told.body["error"]["type"]) == messages
    assert str(error) in told.body["error"]["message"]
