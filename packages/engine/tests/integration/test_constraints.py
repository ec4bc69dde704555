"""Constraints on the embedded model, offline: any schema, any temperature, drafts or none."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deepinfer_engine import (
    LLM,
    ConstraintError,
    SamplingParams,
    SchemaTooComplex,
    json_object,
    json_schema,
    regex,
)

pytest.importorskip("xgrammar", reason="the grammar extra is not installed")

LEAVES = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 8)),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-99, 99),
        st.integers(0, 999),
    ),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["red", 7, None]},
            {"type": "string", "pattern": "^[a-f]{1,4}$"},
            {"type": "string", "format": "date"},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        ]
    ),
)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda properties, closed: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[::2],
            **({"additionalProperties": False} if closed else {}),
        },
        st.dictionaries(st.sampled_from(["a", "b", "the c"]), values, max_size=3),
        st.booleans(),
    )


SCHEMAS = objects(
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            objects(inner),
            st.builds(lambda one: {"type": "array", "items": one, "maxItems": 2}, inner),
            st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
        ),
        max_leaves=4,
    )
)
SLOW = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float64") as model:
        yield model


@pytest.fixture(scope="module")
def without_drafts():
    with LLM(dtype="float64", nextn=0) as model:
        yield model


@SLOW
@given(schema=SCHEMAS, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 99))
def test_any_small_schema_is_obeyed(llm, schema, temperature, seed):
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=900, constraint=json_schema(schema)
    )
    for answer in llm.generate(["Once there was", "Ana lived near"], params):
        assert answer.finish_reason == "stop", answer.text
        jsonschema_rs.validate(schema, json.loads(answer.text), validate_formats=True)


CONSTRAINTS = {
    "schema": json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 4},
            },
            "required": ["name", "colours"],
        }
    ),
    "object": json_object(),
    "text": regex(r"[A-Z][a-z]{2,8}( [a-z]{1,8}){5,20}\."),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_drafts_change_no_greedy_token(llm, without_drafts, kind):
    prompts = ["Once there was a fox who", "Ana lived near the garden with", "Count: a kite,"]
    params = SamplingParams(temperature=0.0, max_tokens=60, constraint=CONSTRAINTS[kind])
    with_drafts = llm.generate(prompts, params)  # as many as the measured step times allow
    without = without_drafts.generate(prompts, params)
    assert [a.token_ids for a in with_drafts] == [a.token_ids for a in without]


def test_the_first_token_obeys_too(llm):
    for seed in range(8):
        params = SamplingParams(
            temperature=2.0, seed=seed, max_tokens=1, constraint=regex("[xyz]+")
        )
        (answer,) = llm.generate("Once there was", params)
        assert re.fullmatch("[xyz]+", answer.text)


def test_constrained_and_free_requests_share_steps(llm):
    free = SamplingParams(temperature=0.0, max_tokens=24)
    alone = llm.generate("Once there was a fox who", free)
    bound = SamplingParams(temperature=1.0, seed=5, max_tokens=24, constraint=regex("(ab )+"))
    assert llm.generate("Once", bound)[0].text.startswith("ab ")
    again = llm.generate("Once there was a fox who", free)
    assert [a.token_ids for a in again] == [a.token_ids for a in alone]


def test_what_cannot_be_enforced_is_an_error_of_its_own(llm):
    with pytest.raises(ConstraintError, match="parenthesis"):
        llm.generate("Once", SamplingParams(constraint=regex("(")))
    with pytest.raises(ConstraintError, match="types"):
        json_schema({"allOf": [{"type": "string"}, {"type": "null"}]})
    with pytest.raises(SchemaTooComplex, match="bytes"):
        json_schema({"enum": ["x" * 2000 + str(i) for i in range(600)]})
    assert llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=4))
