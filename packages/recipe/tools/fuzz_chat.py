"""Generated Chat Completions bodies."""

from __future__ import annotations

import random
from typing import Any

from fuzz_pieces import (
    MODELS,
    PNG,
    SCHEMAS,
    arguments,
    function,
    maybe,
    sampling,
    some,
    text,
    tool_name,
)


def chat_part(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.7:
        return {"type": "text", "text": text(rng)}
    if kind < 0.85:
        url = rng.choice([PNG, "https://x.test/a.png", "ftp://x", "data:text/plain,x"])
        return {
            "type": "image_url",
            "image_url": {
                "url": url,
                **maybe(rng, 0.3, {"detail": rng.choice(["low", "auto", "huge"])}),
            },
        }
    return {
        "type": "file",
        **maybe(rng, 0.7, {"file_data": PNG}),
        **maybe(rng, 0.2, {"file_id": "f"}),
    }


def chat_content(rng: random.Random) -> Any:
    return text(rng) if rng.random() < 0.7 else some(rng, chat_part)


def chat_messages(rng: random.Random) -> list[Any]:
    out: list[Any] = []
    for _ in range(rng.randint(0, 5)):
        role = rng.choice(
            ["system", "user", "user", "assistant", "assistant", "latest_reminder", "developer"]
        )
        if role != "assistant":
            content = text(rng) if role == "latest_reminder" else chat_content(rng)
            out.append({"role": role, "content": content})
            continue
        ids = rng.sample(["c1", "c2", "c3"], rng.choice([0, 0, 1, 2]))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": rng.choice([None, text(rng), chat_content(rng)]),
        }
        if ids:
            message["tool_calls"] = [
                {
                    "id": i,
                    "type": "function",
                    "function": {"name": tool_name(rng), "arguments": arguments(rng)},
                }
                for i in ids
            ]
        message |= maybe(rng, 0.4, {"reasoning_content": text(rng)}) | maybe(
            rng, 0.08, {"prefix": True}
        )
        out.append(message)
        rng.shuffle(ids)
        out += [
            {"role": "tool", "tool_call_id": i, "content": chat_content(rng)}
            for i in ids
            if rng.random() < 0.95
        ]
    return out


def chat(rng: random.Random) -> dict[str, Any]:
    formats: list[Any] = [
        {"type": "text"},
        {"type": "json_object"},
        {
            "type": "json_schema",
            "json_schema": {
                "name": "n",
                "schema": rng.choice(SCHEMAS),
                "strict": rng.choice([True, False]),
            },
        },
        {"type": "regex", "regex": "a+"},
        {"type": "xml"},
    ]
    choice = rng.choice(
        [
            "auto",
            "none",
            "required",
            {"type": "function", "function": {"name": tool_name(rng)}},
            "some",
        ]
    )
    return {
        "model": rng.choice([*MODELS, *MODELS, *MODELS, "gpt"]),
        "messages": chat_messages(rng),
        **maybe(
            rng, 0.4, {"tools": [{"type": "function", "function": f} for f in some(rng, function)]}
        ),
        **maybe(rng, 0.3, {"tool_choice": choice}),
        **maybe(rng, 0.2, {"response_format": rng.choice(formats)}),
        **maybe(
            rng,
            0.4,
            {"thinking": {"type": rng.choice(["enabled", "disabled", "disabled", "adaptive"])}},
        ),
        **maybe(
            rng,
            0.3,
            {
                "reasoning_effort": rng.choice(
                    ["none", "minimal", "low", "high", "xhigh", "max", "most"]
                )
            },
        ),
        **sampling(
            rng,
            [
                "temperature",
                "top_p",
                "max_tokens",
                "n",
                "seed",
                "top_logprobs",
                "frequency_penalty",
                "presence_penalty",
            ],
        ),
        **maybe(rng, 0.2, {"stop": rng.choice(["x", "", ["a", "b"], ["a", ""], ["a"] * 17, None])}),
        **maybe(rng, 0.2, {"logprobs": rng.choice([True, False, None])}),
        **maybe(rng, 0.3, {"stream": rng.choice([True, False])}),
        **maybe(rng, 0.1, {"stream_options": rng.choice([{}, {"include_usage": True}, None])}),
    }
