"""Generated Messages bodies."""

from __future__ import annotations

import random
from typing import Any

from fuzz_pieces import MODELS, SCHEMAS, maybe, sampling, some, text, tool_name


def block(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.75:
        return {"type": "text", "text": text(rng)}
    if kind < 0.9:
        sources: list[Any] = [
            {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
            {"type": "base64", "media_type": "image/png", "data": "%%"},
            {"type": "url", "url": "https://x.test/a.png"},
            {"type": "file", "file_id": "f"},
        ]
        return {"type": "image", "source": rng.choice(sources)}
    return {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": text(rng)},
    }


def messages_turns(rng: random.Random) -> list[Any]:
    out: list[Any] = []
    pending: list[str] = []
    for _ in range(rng.randint(0, 5)):
        role = rng.choice(["user", "assistant", "assistant", "system"]) if not pending else "user"
        blocks: list[Any] = some(rng, block)
        if role == "user":
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": i,
                    **maybe(rng, 0.9, {"content": rng.choice([text(rng), some(rng, block)])}),
                }
                for i in pending
                if rng.random() < 0.95
            ]
            pending, blocks = [], results + blocks
        elif role == "assistant":
            blocks = [b for b in blocks if b["type"] == "text" or rng.random() < 0.1]
            if rng.random() < 0.4:
                blocks.insert(0, {"type": "thinking", "thinking": text(rng), "signature": "s"})
            pending = rng.sample(["t1", "t2", "t3"], rng.choice([0, 0, 1, 2]))
            blocks += [
                {
                    "type": "tool_use",
                    "id": i,
                    "name": tool_name(rng),
                    "input": rng.choice([{}, {"a": 1.5}, "raw", [1]]),
                }
                for i in pending
            ]
            rng.shuffle(pending)
            if rng.random() < 0.05:
                blocks.append(
                    {"type": "server_tool_use", "id": "w", "name": "web_search", "input": {}}
                )
        out.append(
            {
                "role": role,
                "content": text(rng)
                if not pending and role != "assistant" and rng.random() < 0.4
                else blocks,
            }
        )
    return out


def messages_tool(rng: random.Random) -> Any:
    tool = {
        "name": tool_name(rng),
        **maybe(rng, 0.6, {"description": text(rng)}),
        **maybe(rng, 0.9, {"input_schema": rng.choice(SCHEMAS)}),
        **maybe(rng, 0.2, {"defer_loading": rng.choice([True, False])}),
    }
    return {
        **tool,
        **maybe(rng, 0.1, {"type": rng.choice(["custom", "web_search_20250305", "bash_20250124"])}),
    }


def messages(rng: random.Random) -> dict[str, Any]:
    choice = rng.choice(
        [
            {"type": "auto"},
            {"type": "any"},
            {"type": "none"},
            {"type": "tool", "name": tool_name(rng)},
        ]
    )
    return {
        "model": rng.choice([*MODELS, *MODELS, *MODELS, "gpt"]),
        "messages": messages_turns(rng),
        "max_tokens": rng.choice([1, 100, 10**9, 0]),
        **maybe(
            rng, 0.4, {"system": rng.choice([text(rng), [{"type": "text", "text": text(rng)}]])}
        ),
        **maybe(rng, 0.4, {"tools": some(rng, messages_tool)}),
        **maybe(rng, 0.3, {"tool_choice": choice}),
        **maybe(
            rng,
            0.5,
            {
                "thinking": {
                    "type": rng.choice(["enabled", "disabled", "disabled", "adaptive"]),
                    "budget_tokens": 1024,
                }
            },
        ),
        **maybe(
            rng,
            0.2,
            {"output_config": {"effort": rng.choice(["low", "high", "max", "none", "most"])}},
        ),
        **sampling(rng, ["temperature", "top_p", "top_k"]),
        **maybe(rng, 0.2, {"stop_sequences": rng.choice([["a"], [""], [], ["a"] * 17])}),
        **maybe(rng, 0.3, {"stream": rng.choice([True, False])}),
    }
