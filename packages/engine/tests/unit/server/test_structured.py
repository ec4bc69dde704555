"""`structured_outputs` and `guided_*`: the form that other servers' clients ask for."""

from __future__ import annotations

import json

import pytest

from deepinfer_engine import RequestError, choice, ebnf
from deepinfer_engine.codec.errors import InvalidRequest
from deepinfer_engine.codec.structured import read_form

RULES = 'root ::= "a" | "b" root'
FORMS = {
    "json": ({"type": "object", "properties": {"a": {"type": "integer"}}}, "json_schema"),
    "regex": ("[ab]+", "regex"),
    "choice": (["yes", "no"], "or"),
    "grammar": (RULES, "grammar"),
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def types(node) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(types, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    own = {node["type"]} if isinstance(node.get("type"), str) else set()
    return own.union(*(types(value) for value in node.values()))


def prepared(codec, protocol, **fields):
    what = CHAT if protocol == "chat" else {"prompt": "Hi"}
    body = {"model": codec.model_names[0], **what, **fields}
    return codec.prepare(protocol, json.dumps(body).encode(), 4096)


@pytest.mark.parametrize("protocol", ["chat", "completions"])
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("older", [False, True])
def test_a_form_becomes_the_constraint_of_every_answer(codec, protocol, kind, older):
    value, node = FORMS[kind]
    fields = {f"guided_{kind}": value} if older else {"structured_outputs": {kind: value}}
    request = prepared(codec, protocol, n=2, **fields)
    assert request.warnings == ()
    assert request.constraint_param == next(iter(fields)) + ("" if older else f".{kind}")
    for part in request.parts:
        constraint = part.sampling.constraint
        assert constraint is not None
        assert constraint.needed
        tag = json.loads(constraint.grammar)
        assert tag["type"] == "structural_tag"
        assert node in types(tag)
        assert "a form stands here" not in constraint.grammar


def test_thinking_stays_free_before_the_form(codec):
    request = prepared(codec, "chat", structured_outputs={"choice": ["yes", "no"]})
    tag = json.loads(request.parts[0].sampling.constraint.grammar)
    assert tag["format"]["type"] == "sequence"
    assert tag["format"]["elements"][0]["type"] == "any_text"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice.1"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_grammar": "x" * (64 * 1024 + 1)}, "guided_grammar"),
        ({"guided_choice": "yes"}, "guided_choice"),
    ],
)
def test_what_is_no_form_is_refused_by_name(codec, fields, param):
    with pytest.raises(InvalidRequest) as refused:
        prepared(codec, "completions", **fields)
    assert refused.value.param == param


def test_one_form_beside_tools_or_another_format_is_refused(codec):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"name": "a", "schema": {"type": "object"}}
    format_ = {"type": "json_schema", "json_schema": schema}
    for other in ({"tools": [tool]}, {"response_format": format_}):
        with pytest.raises(InvalidRequest, match="cannot be combined"):
            prepared(codec, "chat", guided_regex="a", **other)


def test_a_form_and_a_minimum_do_not_go_together(codec):
    with pytest.raises(InvalidRequest, match="min_tokens"):
        prepared(codec, "completions", guided_regex="a", min_tokens=3)


def test_a_body_that_asks_for_none_is_not_read_again():
    assert read_form(b'{"prompt": "guided tour"') is None


def test_offline_forms():
    tag = json.loads(choice(["left", "right"]).grammar)
    values = [element["value"] for element in tag["format"]["elements"]]
    assert values == ["left", "right"]
    assert json.loads(choice(["one"]).grammar)["format"]["type"] == "const_string"
    assert json.loads(ebnf(RULES).grammar)["format"] == {"type": "grammar", "grammar": RULES}
    for wrong in ([], "text", ["a", ""]):
        with pytest.raises(RequestError):
            choice(wrong)
    with pytest.raises(RequestError):
        ebnf(" ")
