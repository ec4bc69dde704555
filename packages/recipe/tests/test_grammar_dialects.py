"""Answers of models with chat templates, held to tools and schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from template_support import BEGIN, END, SOURCES, TOKENS, tokenizer

from deepinfer_recipe import (
    ConversionOptions,
    Exchange,
    GrammarVocabulary,
    TemplateModel,
    compile_grammar,
    request_grammar,
)

SCHEMA = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
    "required": ["town", "n"],
    "additionalProperties": False,
}


def opened(kind: str, **more: Any) -> Exchange[str]:
    model = TemplateModel(
        SOURCES[kind],
        special_tokens=TOKENS[kind] if kind == "hermes" else (),
        bos_token=BEGIN.get(kind, ""),
        eos_token=END.get(kind, ""),
    )
    options = ConversionOptions().with_model_versions_by_name({"m": model})
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "json"}],
        "tools": [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}],
        **more,
    }
    return Exchange("chat", body, id="i", options=options.with_thinking_before_forced_calls(True))


@pytest.mark.parametrize("kind", ["chatml", "hermes", "mistral", "llama3"])
def test_a_grammar_is_written_without_any_library(kind: str) -> None:
    for choice in ("auto", "required"):
        grammar = request_grammar(opened(kind, tool_choice=choice).request)
        assert grammar is not None
        assert '{\\"name\\": \\"get\\"' in grammar.text


def run(kind: str, seed: int, **more: Any) -> Any:
    support = pytest.importorskip("grammar_support", reason="the grammar extra is not installed")
    pytest.importorskip("xgrammar", reason="the grammar extra is not installed")
    own = tokenizer()
    exchange = opened(kind, **more)
    grammar = request_grammar(exchange.request)
    assert grammar is not None
    end = own.special_id("<｜end▁of▁sentence｜>")
    vocabulary = GrammarVocabulary.of(own, stop_token_ids=[end], marks=TOKENS["hermes"])
    compiled = compile_grammar(grammar.text, vocabulary)
    ids = support.random_answer(compiled, "DeepSeek-V4-Pro", seed)
    exchange.answer.text(own.backend.decode(ids[:-1], skip_special_tokens=False))
    exchange.answer.finish()
    return exchange.response()["choices"][0]["message"], exchange.answer.tool_call_repairs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["chatml", "hermes", "mistral", "llama3"])
def test_random_tokens_make_the_demanded_call(kind: str) -> None:
    pytest.importorskip("xgrammar", reason="the grammar extra is not installed")
    for seed in range(2):
        message, repairs = run(kind, seed, tool_choice="required")
        for call in message["tool_calls"]:
            assert call["function"]["name"] == "get"
            jsonschema_rs.validate(SCHEMA, json.loads(call["function"]["arguments"]))
        assert repairs == []
