"""Small pieces that generated bodies are made of."""

from __future__ import annotations

import random
from typing import Any

MODELS = ["DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash"]
WORDS = [
    "",
    "x",
    "json",
    "a\n\nb",
    "é😀",
    "<｜User｜>",
    "</think>",
    "｜DSML｜",
    "<｜image｜>",
    " ",
    "\x00",
]
SCHEMAS: list[Any] = [
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": -1.50}}},
    {"type": "object", "properties": {"l": {"type": "array", "items": {"type": "number"}}}},
    {"type": "object", "properties": {"o": {"anyOf": [{"type": "null"}, {"type": "string"}]}}},
    {"type": "object", "$defs": {"d": {}}, "properties": {"d": {"$ref": "#/$defs/d"}}},
    {"type": "string"},
    {"type": "nonsense"},
    {},
    True,
    None,
]  # fmt: skip
PNG = "data:image/png;base64,iVBORw0KGgo="


def maybe(rng: random.Random, share: float, value: Any) -> dict[str, Any]:
    return value if rng.random() < share else {}


def number(rng: random.Random) -> Any:
    return rng.choice(
        [0, 1, 2, -1, 0.5, 0.95, 1.0, 1.5, 20, 21, 4096, 2**31, 2**63, 2**64, None, "1", True]
    )


def text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, 3)))


def tool_name(rng: random.Random) -> str:
    return rng.choice(
        ["f", "g", "get_weather", "a-b", "f" * 128, "f" * 129, "bad name", "", "apply_patch"]
    )


def some(rng: random.Random, make: Any, low: int = 0, high: int = 3) -> list[Any]:
    return [make(rng) for _ in range(rng.randint(low, high))]


def arguments(rng: random.Random) -> str:
    return rng.choice(
        ["{}", '{"a": "x"}', '{"a": 1.50, "b": [1e2]}', "bad", "", "[1]", '{"s": "<\\n>"}']
    )


def function(rng: random.Random) -> dict[str, Any]:
    return {
        "name": tool_name(rng),
        **maybe(rng, 0.6, {"description": text(rng)}),
        **maybe(rng, 0.8, {"parameters": rng.choice(SCHEMAS)}),
        **maybe(rng, 0.2, {"strict": rng.choice([True, False, None])}),
    }


def sampling(rng: random.Random, names: list[str]) -> dict[str, Any]:
    return {name: number(rng) for name in names if rng.random() < 0.08}
