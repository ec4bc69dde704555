"""The named decisions behind differences of streams from the reference's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class Case:
    """What is needed to tell which decisions may show in a case."""

    text: str
    body: dict[str, Any]
    reason: str
    are_ids: bool
    has_logprobs: bool

    @property
    def has_stops(self) -> bool:
        return bool(self.body.get("stop") or self.body.get("stop_sequences"))

    @property
    def is_json(self) -> bool:
        return "json_object" in json.dumps(self.body)


def without(value: Any, name: str) -> Any:
    """`value` without the members whose name ends in `name`."""
    if isinstance(value, dict):
        return {k: without(inner, name) for k, inner in value.items() if not k.endswith(name)}
    if isinstance(value, list):
        return [without(inner, name) for inner in value]
    return value


def without_arguments(value: Any) -> Any:
    """`value` without what calls are made with."""
    if isinstance(value, dict):
        return {
            key: without_arguments(inner)
            for key, inner in value.items()
            if key not in ("arguments", "input", "partial_json")
        }
    if isinstance(value, list):
        kept = [inner for inner in value if not is_argument_delta(inner)]
        return [without_arguments(inner) for inner in kept]
    return value


def is_argument_delta(event: Any) -> bool:
    if not isinstance(event, list) or len(event) != 2 or not isinstance(event[1], dict):
        return False
    text = json.dumps(event[1])
    kinds = ("function_call_arguments.delta", "custom_tool_call_input.delta", "input_json_delta")
    is_piece = '"tool_calls"' in text and '"type": "function"' not in text
    return is_piece or any(kind in text for kind in kinds)


def without_character(value: Any, character: str) -> Any:
    if isinstance(value, str):
        return value.replace(character, "")
    if isinstance(value, dict):
        return {key: without_character(inner, character) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_character(inner, character) for inner in value]
    return value


HALF_TAG = re.compile(r"<[/｜DSMLthink]*\n")
ODD_NAME = re.compile(r'name="[^">]*( [^s"]|")[^">]*" string=')
Decision = tuple[str, Callable[[Case], bool], Callable[[Any], Any]]
DECISIONS: list[Decision] = [
    (
        "a call cut short by a normal stop is closed",
        lambda case: case.reason == "Stop",
        without_arguments,
    ),
    (
        "a parameter name with spaces or quotes stays valid JSON",
        lambda case: ODD_NAME.search(case.text) is not None,
        without_arguments,
    ),
    (
        "newlines between the beginning of a tag and a tag all vanish",
        lambda case: HALF_TAG.search(case.text) is not None,
        lambda value: without_character(value, "\n"),
    ),
    (
        "the number of spaces around JSON differs",
        lambda case: case.is_json,
        lambda value: without_character(value, " "),
    ),
    (
        "tokens of dropped text have no log probabilities, however cut",
        lambda case: case.has_logprobs,
        lambda value: without(value, "logprobs"),
    ),
    (
        "a token half thinking, half markup counts as thinking",
        lambda case: case.are_ids,
        lambda value: without(value, "reasoning_tokens"),
    ),
    (
        "tokens behind a stop sequence are not counted, however cut",
        lambda case: case.are_ids and case.has_stops,
        lambda value: without(value, "usage"),
    ),
]


def explained(case: Case, ours: Any, theirs: Any) -> str | None:
    """The decisions behind a difference: the fewest that, set aside, leave none."""
    possible = [decision for decision in DECISIONS if decision[1](case)]
    for count in (1, 2, 3):
        for chosen in combinations(possible, count):
            one, other = ours, theirs
            for _, _, neutralised in chosen:
                one, other = neutralised(one), neutralised(other)
            if one == other:
                return " + ".join(name for name, _, _ in chosen)
    return None
