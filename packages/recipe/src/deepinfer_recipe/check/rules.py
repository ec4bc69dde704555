"""Rules that the three protocols share: fields, types, sums, errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from deepinfer_recipe.serving.wire_errors import ProtocolName

_NAMES = {
    str: "a string",
    int: "an integer",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


class Problems(list[str]):
    """What is wrong with an answer, in words."""

    def also(self, more: Iterable[str]) -> Problems:
        """Note more; returns self."""
        self.extend(more)
        return self

    def need(self, holds: bool, text: str) -> bool:
        """Note `text` unless it `holds`."""
        if not holds:
            self.append(text)
        return holds

    def field(self, value: Any, name: str, *kinds: type, where: str = "") -> Any:
        """The field of an object, noted if it is missing or of another kind; None then."""
        place = f"{where}.{name}" if where else name
        if not isinstance(value, dict):
            self.append(f"{where or 'the answer'}: expected an object, got {shown(value)}")
            return None
        if name not in value:
            self.append(f"{place}: missing")
            return None
        found = value[name]
        is_kind = isinstance(found, kinds) and not (isinstance(found, bool) and bool not in kinds)
        wanted = " or ".join(_NAMES[kind] for kind in kinds)
        return (
            found if self.need(is_kind, f"{place}: expected {wanted}, got {shown(found)}") else None
        )


def shown(value: Any) -> str:
    """A value, short."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 60 else text[:57] + "..."


def parsed(problems: Problems, text: str, what: str) -> Any:
    """JSON text as a value; None and a note if it is none."""
    try:
        return json.loads(text)
    except ValueError as error:
        problems.append(f"{what}: not JSON ({error}): {text[:60]!r}")
        return None


def check_json_object(problems: Problems, text: Any, where: str) -> None:
    """Arguments of a call: the text of a JSON object."""
    if isinstance(text, str):
        value = parsed(problems, text, where)
        problems.need(
            isinstance(value, dict), f"{where}: expected a JSON object, got {text[:60]!r}"
        )


def check_counts(problems: Problems, usage: Any, names: Sequence[str], where: str) -> list[int]:
    """Counts of tokens: integers that are not negative."""
    counts: list[int] = []
    for name in names:
        value = problems.field(usage, name, int, where=where)
        if value is not None:
            problems.need(value >= 0, f"{where}.{name}: negative")
            counts.append(value)
    return counts


def check_error(protocol: ProtocolName, status: int, body: Any, param: str | None) -> Problems:
    """An error body in the protocol's shape; `param` is the field it must name."""
    problems = Problems()
    problems.need(400 <= status < 500, f"status {status}: expected 4xx")
    error = problems.field(body, "error", dict)
    message = problems.field(error, "message", str, where="error") if error is not None else None
    if error is None:
        return problems
    problems.need(bool(message), "error.message: empty")
    problems.field(error, "type", str, where="error")
    if protocol == "messages":
        problems.need(
            body.get("type") == "error", f"type: expected error, got {shown(body.get('type'))}"
        )
        named = message or ""
    else:
        problems.field(error, "param", str, type(None), where="error")
        problems.field(error, "code", str, int, type(None), where="error")
        named = f"{error.get('param')} {message}"
    if param is not None:
        problems.need(param in named, f"the error does not name {param}: {named[:120]!r}")
    return problems
