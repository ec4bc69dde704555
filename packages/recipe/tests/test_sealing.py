"""Sealed reasoning opens for whom it was made, unchanged, and for nobody else."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepinfer_recipe import (
    ConversionOptions,
    Exchange,
    ReasoningSealer,
    RecipeError,
    SealError,
    error_response,
)

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
SEALER = ReasoningSealer({"k1": KEY})
MODEL = "DeepSeek-V4.1-Flash"
INCLUDE = ["reasoning.encrypted_content"]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_what_is_sealed_opens_to_the_same_text(text: str) -> None:
    sealed = SEALER.seal(text)
    assert SEALER.open(sealed) == text
    assert sealed != SEALER.seal(text)
    if len(text) > 8:
        assert text not in sealed


@settings(max_examples=60)
@given(st.integers(0, 60), st.sampled_from("ABCxyz019-_."))
def test_no_changed_text_opens(at: int, other: str) -> None:
    sealed = SEALER.seal("a thought")
    # The last base64 character before the padding carries bits that decoding drops.
    at %= len(sealed.rstrip("=")) - 1
    assume(sealed[at] != other)
    for changed in (sealed[:at] + other + sealed[at + 1 :], sealed[:at], sealed + other):
        with pytest.raises(SealError):
            SEALER.open(changed)


def test_another_key_or_audience_does_not_open_it() -> None:
    sealed = SEALER.for_audience("key-1").seal("x")
    assert SEALER.for_audience("key-1").open(sealed) == "x"
    for sealer in (
        SEALER,
        SEALER.for_audience("key-2"),
        ReasoningSealer({"k1": OTHER}, audience="key-1"),
    ):
        with pytest.raises(SealError, match="changed, or sealed for somebody else"):
            sealer.open(sealed)
    with pytest.raises(SealError, match="not known here: 'k1'"):
        ReasoningSealer({"k2": KEY}).open(sealed)


def test_a_replaced_key_still_opens_what_it_sealed() -> None:
    rotated = ReasoningSealer({"k2": OTHER, "k1": KEY})
    assert rotated.open(SEALER.seal("old")) == "old"
    assert rotated.seal("new").startswith("dr1.k2.")


def test_keys_come_as_text_and_are_never_repeated_in_errors() -> None:
    text = "k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
    assert ReasoningSealer.from_text(text).open(SEALER.seal("x")) == "x"
    for wrong in ("", "k1", "k1:%%%", "k1:AAAA", f"{text},{text}", "bad id:" + text[3:]):
        with pytest.raises(ValueError, match=r"key|bytes") as caught:
            ReasoningSealer.from_text(wrong)
        assert text[3:] not in str(caught.value)


def opened(items: Any, sealer: ReasoningSealer | None = SEALER, **more: Any) -> Exchange:
    body = {"model": MODEL, "input": items, "tools": [{"type": "function", "name": "f"}], **more}
    options = ConversionOptions().with_reasoning_sealer(sealer)
    return Exchange("responses", body, id="resp_1", created=0, options=options)


def thought(exchange: Exchange) -> tuple[dict[str, Any], list[str]]:
    frames = exchange.answer.text("Because.</think>Four.") + exchange.answer.finish()
    return exchange.response()["output"][0], frames


def test_reasoning_survives_a_stateless_turn_without_being_shown() -> None:
    item, frames = thought(opened("2 + 2?", include=INCLUDE, stream=True))
    assert item["encrypted_content"].startswith("dr1.k1.")
    added = next(json.loads(f.split("data: ")[1]) for f in frames if "output_item.added" in f)
    assert added["item"]["encrypted_content"] is None
    user = {"role": "user", "content": "2 + 2?"}
    carried = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    said = {"role": "assistant", "content": "Four."}
    second = opened([user, carried, said, {"role": "user", "content": "+ 1?"}])
    assert "<think>Because.</think>Four." in second.prompt


def test_sealed_only_where_asked_for_and_a_placeholder_without_keys() -> None:
    assert thought(opened("x"))[0]["encrypted_content"] is None
    assert thought(opened("x", sealer=None, include=INCLUDE))[0]["encrypted_content"] == "resp_1-0"


@pytest.mark.parametrize(
    "sealed",
    [
        SEALER.seal("x")[:-6] + "AAAAAA",
        ReasoningSealer({"k9": KEY}).seal("x"),
        ReasoningSealer({"k1": OTHER}).seal("x"),
        "resp_1-0",
        "",
        7,
    ],
    ids=["changed", "other key id", "other key", "placeholder", "empty", "no string"],
)
def test_what_does_not_open_is_a_400_that_names_the_field(sealed: Any) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    with pytest.raises(RecipeError) as caught:
        opened([{"role": "user", "content": "x"}, item])
    status, body = error_response("responses", caught.value)
    assert (status, body["error"]["param"]) == (400, "input[1].encrypted_content")


def test_a_placeholder_beside_the_text_itself_is_ignored() -> None:
    content = [{"type": "reasoning_text", "text": "Because."}]
    item = {"type": "reasoning", "content": content, "encrypted_content": "resp_1-0"}
    exchange = opened(
        [{"role": "user", "content": "x"}, item, {"role": "assistant", "content": "y"}]
    )
    assert "<think>Because.</think>y" in exchange.prompt


def test_without_the_library_the_error_names_the_extra() -> None:
    script = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import deepinfer_recipe as r\n"
        "try: r.ReasoningSealer({'k': bytes(32)})\n"
        "except r.MissingExtraError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "pip install './packages/recipe[sealed]'" in done.stdout
