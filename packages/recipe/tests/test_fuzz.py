"""Whatever a client sends, only this package's errors come out, and accepted bodies render."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_recipe import Exchange, RecipeError, error_response

LINES = (Path(__file__).parent / "corpus/convert.jsonl").read_text("utf-8").splitlines()
BODIES = [
    (case["protocol"], case["request"])
    for case in map(json.loads, LINES)
    if isinstance(case["request"], dict)
]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**64),
    st.floats(allow_nan=False),
    st.sampled_from(["", "x", "json", "auto", "none", "text", "user", "\ud800", "｜DSML｜", "é"]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "id", "properties"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here] if here else []
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        found += places(inner, (*here, key))
    return found


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_bodies_raise_only_our_errors(data: st.DataObject) -> None:
    protocol, body = data.draw(st.sampled_from(BODIES))
    body = json.loads(json.dumps(body))
    for _ in range(data.draw(st.integers(1, 3))):
        choices = places(body)
        if not choices:
            break
        *path, last = data.draw(st.sampled_from(choices))
        container = body
        for key in path:
            container = container[key]
        action = data.draw(st.sampled_from(["replace", "remove", "repeat"]))
        if action == "replace":
            container[last] = data.draw(VALUES)
        elif action == "remove":
            del container[last]
        elif isinstance(container, list):
            container.insert(last, json.loads(json.dumps(container[last])))
    profile = data.draw(st.sampled_from(["parity", "extended"]))
    try:
        opened = Exchange(protocol, body, id="x", created=0, profile=profile)
    except RecipeError as error:
        status, payload = error_response(protocol, error)
        assert status in (400, 404)
        assert json.dumps(payload)
        return
    opened.answer.text(data.draw(st.text(max_size=20)))
    opened.answer.finish()
    json.dumps(opened.response())
