"""Generated Responses bodies."""

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


def responses_part(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.75:
        return {"type": rng.choice(["input_text", "output_text"]), "text": text(rng)}
    if kind < 0.9:
        return {
            "type": "input_image",
            **maybe(rng, 0.9, {"image_url": PNG}),
            **maybe(rng, 0.1, {"file_id": "f"}),
        }
    return {"type": rng.choice(["input_file", "input_file", "refusal"]), "file_data": "x"}


def responses_items(rng: random.Random) -> list[Any]:
    out: list[Any] = []
    for _ in range(rng.randint(0, 6)):
        kind = rng.choice(
            [
                "message",
                "message",
                "message",
                "reasoning",
                "call",
                "call",
                "custom",
                "search",
                "other",
            ]
        )
        if kind == "message":
            role = rng.choice(["user", "user", "assistant", "system", "developer"])
            content = text(rng) if rng.random() < 0.6 else some(rng, responses_part)
            out.append({"type": "message", "role": role, "content": content})
            if rng.random() < 0.5:
                del out[-1]["type"]
        elif kind == "reasoning":
            parts = [
                {"type": "reasoning_text", "text": text(rng)} for _ in range(rng.randint(0, 2))
            ]
            out.append(
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [],
                    **maybe(rng, 0.8, {"content": parts}),
                }
            )
        elif kind == "call":
            ids = rng.sample(["c1", "c2", "c3"], rng.choice([1, 1, 2]))
            out += [
                {
                    "type": "function_call",
                    "call_id": i,
                    "name": tool_name(rng),
                    "arguments": arguments(rng),
                    **maybe(rng, 0.15, {"namespace": "ns"}),
                }
                for i in ids
            ]
            rng.shuffle(ids)
            out += [
                {
                    "type": "function_call_output",
                    "call_id": i,
                    "output": rng.choice([text(rng), [{"type": "input_text", "text": text(rng)}]]),
                }
                for i in ids
                if rng.random() < 0.95
            ]
        elif kind == "custom":
            out.append(
                {
                    "type": "custom_tool_call",
                    "call_id": "p1",
                    "name": "apply_patch",
                    "input": text(rng),
                }
            )
            if rng.random() < 0.9:
                out.append(
                    {"type": "custom_tool_call_output", "call_id": "p1", "output": text(rng)}
                )
        elif kind == "search":
            out.append(
                {
                    "type": "tool_search_call",
                    "call_id": "s1",
                    "execution": "client",
                    "arguments": {"q": text(rng)},
                }
            )
            found = [{"type": "function", **function(rng)}]
            out.append(
                {
                    "type": "tool_search_output",
                    "call_id": "s1",
                    "execution": "client",
                    "tools": found,
                }
            )
        else:
            out.append(
                {"type": rng.choice(["web_search_call", "item_reference", "mystery"]), "id": "x"}
            )
    return out


def responses_tool(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.6:
        return {"type": "function", **function(rng)}
    if kind < 0.75:
        members = [{"type": "function", **function(rng)} for _ in range(rng.randint(0, 2))]
        return {
            "type": "namespace",
            "name": rng.choice(["ns", "other", "bad name"]),
            **maybe(rng, 0.5, {"description": text(rng)}),
            "tools": members,
        }
    if kind < 0.85:
        return {"type": "custom", "name": rng.choice(["apply_patch", "apply_patch", "shell"])}
    if kind < 0.92:
        return {
            "type": "tool_search",
            "execution": rng.choice(["client", "server"]),
            "description": "d",
            "parameters": {"type": "object"},
        }
    return {"type": rng.choice(["web_search", "web_search_preview", "file_search", "mcp"])}


def responses(rng: random.Random) -> dict[str, Any]:
    choice = rng.choice(
        [
            "auto",
            "none",
            "required",
            {"type": "function", "name": tool_name(rng)},
            {"type": "custom", "name": "apply_patch"},
            {"type": "web_search"},
        ]
    )
    formats: list[Any] = [
        {"type": "text"},
        {"type": "json_object"},
        {
            "type": "json_schema",
            "name": "n",
            "schema": rng.choice(SCHEMAS),
            **maybe(rng, 0.5, {"strict": True}),
        },
    ]
    given = rng.choice(
        [text(rng), None, responses_items(rng), responses_items(rng), responses_items(rng)]
    )
    return {
        "model": rng.choice([*MODELS, *MODELS, *MODELS, "gpt"]),
        **maybe(rng, 0.95, {"input": given}),
        **maybe(rng, 0.4, {"instructions": text(rng)}),
        **maybe(rng, 0.4, {"tools": some(rng, responses_tool)}),
        **maybe(rng, 0.3, {"tool_choice": choice}),
        **maybe(rng, 0.2, {"text": {"format": rng.choice(formats)}}),
        **maybe(
            rng,
            0.5,
            {
                "reasoning": {
                    "effort": rng.choice(["none", "none", "low", "high", "max", None, "most"])
                }
            },
        ),
        **sampling(rng, ["temperature", "top_p", "max_output_tokens", "top_logprobs"]),
        **maybe(rng, 0.3, {"stream": rng.choice([True, False])}),
        **maybe(
            rng,
            0.1,
            {"store": True, "previous_response_id": "resp_1", "metadata": {"a": "b"}, "user": "u"},
        ),
    }
