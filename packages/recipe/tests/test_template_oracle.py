"""Chat templates beside transformers: the same text and the same token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from template_support import BEGIN, END, SOURCES, TOKENS, tokenizer

from deepinfer_recipe import ConversionOptions, Exchange, TemplateModel, Tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Weather <é>",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get", "arguments": {"town": 'Os"lo é'}},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "Hello,\nworld é😀"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "  again "},
    ],
    "tools": [
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "abcdefghi", "name": "get"},
    ],
}


def special(kind: str) -> Tokenizer:
    """A real vocabulary in which the template's tokens are added tokens."""
    spec = json.loads(tokenizer().backend.to_str())
    known = {token["content"] for token in spec["added_tokens"]}
    last = max(token["id"] for token in spec["added_tokens"])
    for token in TOKENS[kind]:
        if token not in known:
            last += 1
            spec["added_tokens"].append(
                {
                    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                    "id": last,
                    "content": token,
                    "special": True,
                }
            )
    return Tokenizer.from_str(json.dumps(spec))


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("kind", SOURCES)
def test_text_and_ids_are_those_of_transformers(kind: str, name: str, tmp_path: Path) -> None:
    turns = CONVERSATIONS[name]
    uses_tools = name == "tools"
    if kind == "chatml" and uses_tools:
        pytest.skip("its template knows no tools: nothing to compare with")
    if kind == "mistral" and name == "system":
        pytest.skip("its template takes no system message: ours joins it to the user's")
    own = special(kind)
    path = tmp_path / "tokenizer.json"
    path.write_text(own.backend.to_str(), encoding="utf-8")
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        bos_token=BEGIN.get(kind),
        eos_token=END.get(kind),
        chat_template=SOURCES[kind],
    )
    more: dict[str, Any] = {"tools": [TOOL]} if uses_tools else {}
    text = oracle.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **more)
    ids = oracle.apply_chat_template(
        turns, tokenize=True, add_generation_prompt=True, return_dict=False, **more
    )
    model = TemplateModel(
        SOURCES[kind],
        special_tokens=TOKENS[kind],
        bos_token=BEGIN.get(kind, ""),
        eos_token=END.get(kind, ""),
    )
    options = ConversionOptions().with_model_versions_by_name({"m": model})
    sent = json.loads(json.dumps(turns))
    for turn in sent:
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        turn.pop("name", None)
    exchange = Exchange("chat", {"model": "m", "messages": sent, **more}, id="i", options=options)
    assert exchange.prompt == text
    assert exchange.encode(own) == ids
