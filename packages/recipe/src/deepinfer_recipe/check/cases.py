"""The cases of a check: the corpus shipped with the package, or recorded ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from deepinfer_recipe.serving.wire_errors import ProtocolName

SHIPPED = Path(__file__).with_name("corpus.jsonl")
Kind: TypeAlias = Literal["wire", "convert", "stream"]
_NEEDS = ("previous_response_id", "conversation", "image", "input_image", "input_file", "file")
"""Beginnings of names in requests that want more of a server than to answer text."""
_MAX_LINE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and what is known of its answer.

    kind: `wire` cases tell the status and the field at fault; the recorded kinds tell the prompt
        (`convert`) or the answer to given output (`stream`).
    request: the body, an object or a raw text.
    """

    id: str
    kind: Kind
    protocol: ProtocolName
    request: Any
    fields: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def wants_error(self) -> bool | None:
        """Whether the request must be refused; None where servers may differ."""
        if self.kind == "wire":
            return self.fields["expect"]["status"] >= 400
        expect = self.fields.get("expect", {})
        # What a recorded request was refused for, another server may well support; and it may
        # lack what the request needs of it.
        text = json.dumps(self.request)
        depends = self.fields.get("options") or any(f'"{name}' in text for name in _NEEDS)
        return None if "rejected_at" in expect or depends else False


def read_cases(path: Path | None) -> list[Case]:
    """The cases of a file or of a directory of `.jsonl` files; the shipped ones for None.

    Raises `ValueError` naming the file and line; `OSError`.
    """
    if path is None:
        files = [SHIPPED]
    elif path.is_dir():
        files = sorted(path.glob("*.jsonl"))
    else:
        files = [path]
    cases = [case for file in files for case in _read(file)]
    if not cases:
        raise ValueError(f"{path} holds no cases that can be checked")
    return cases


def _read(path: Path) -> Iterator[Case]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if len(line) > _MAX_LINE_BYTES:
                raise ValueError(f"{path}:{number}: a case may have {_MAX_LINE_BYTES} bytes")
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            case = _case(value)
            if case is not None:
                yield case


def _case(value: Any) -> Case | None:
    """A case of a kind that can be checked; None for lines of another kind."""
    if not isinstance(value, dict) or value.get("protocol") not in (
        "chat",
        "responses",
        "messages",
    ):
        return None
    if not isinstance(value.get("id"), str) or "request" not in value:
        return None
    expect = value.get("expect")
    if isinstance(value.get("chunks"), list) and isinstance(value.get("expect_response"), dict):
        kind: Kind = "stream"
    elif isinstance(expect, dict) and isinstance(expect.get("status"), int):
        kind = "wire"
    elif isinstance(expect, dict) and ("prompt" in expect or "rejected_at" in expect):
        kind = "convert"
    else:
        return None
    return Case(value["id"], kind, value["protocol"], value["request"], value)
