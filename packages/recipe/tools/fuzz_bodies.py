"""Generated request bodies: from scratch, and recorded ones damaged."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_chat import chat
from fuzz_messages import messages
from fuzz_pieces import maybe
from fuzz_responses import responses

CORPUS = Path(__file__).parents[1] / "tests" / "corpus"
PROTOCOLS = ("chat", "responses", "messages")
MAX_DEPTH = 50
LEAVES = [
    *[None, True, False, 0, -1, 1.5, 2**64, [], {}, [{}], {"type": "text"}],
    *["", "x", "json", "auto", "none", "text", "user", "é"],
]


@cache
def recorded() -> list[tuple[str, str, dict[str, Any]]]:
    lines = (CORPUS / "convert.jsonl").read_text("utf-8").splitlines()
    cases = [json.loads(line) for line in lines]
    return [
        (case["protocol"], json.dumps(case["request"]), case.get("options", {}))
        for case in cases
        if isinstance(case["request"], dict)
    ]


def damage(rng: random.Random, body: Any) -> None:
    """Replace, remove or repeat a random member of a random container."""
    containers: list[Any] = []

    def walk(value: Any, depth: int) -> None:
        if isinstance(value, dict | list) and value and depth < MAX_DEPTH:
            containers.append(value)
            for inner in value.values() if isinstance(value, dict) else value:
                walk(inner, depth + 1)

    walk(body, 0)
    if not containers:
        return
    container = rng.choice(containers)
    place = (
        rng.choice(list(container))
        if isinstance(container, dict)
        else rng.randrange(len(container))
    )
    action = rng.choice(["replace", "replace", "remove", "repeat", "graft"])
    if action == "replace":
        container[place] = json.loads(json.dumps(rng.choice(LEAVES)))
    elif action == "remove":
        del container[place]
    elif action == "graft":
        container[place] = json.loads(json.dumps(rng.choice(containers)))
    elif isinstance(container, list):
        container.insert(place, json.loads(json.dumps(container[place])))


def generate(rng: random.Random) -> tuple[str, Any, dict[str, Any]]:
    """Protocol, body and options."""
    options: dict[str, Any] = {
        **maybe(rng, 0.3, {"default_thinking_mode": False}),
        **maybe(rng, 0.2, {"reasoning_content_behavior": "Reject"}),
        **maybe(rng, 0.3, {"responses_web_search": "Reject"}),
        **maybe(rng, 0.3, {"messages_web_search": "Drop"}),
        **maybe(rng, 0.1, {"thinking_max_tokens_upper_bound": 50}),
    }
    if rng.random() < 0.5:
        protocol, body, own = rng.choice(recorded())
        body = json.loads(body)
        options = own if rng.random() < 0.7 else {**own, **options}
        for _ in range(rng.randint(1, 3)):
            damage(rng, body)
    else:
        protocol = rng.choice(PROTOCOLS)
        body = {"chat": chat, "responses": responses, "messages": messages}[protocol](rng)
        if rng.random() < 0.1:
            damage(rng, body)
    return protocol, body, options
