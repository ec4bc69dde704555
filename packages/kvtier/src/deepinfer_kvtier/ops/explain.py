"""Why did the second request not hit? Names the first difference and what it costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from deepinfer_kvtier.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Explanation:
    """Comparison of two prompts.

    unit:            "token", or "character" where the files hold plain text.
    first_difference: index of the first unit that differs; None when one is the start of the other.
    shared:          units that are equal from the start.
    reused_blocks:   whole blocks the second prompt can take from the first; None for text.
    recomputed_from: first unit that must be computed again; None for text.
    """

    unit: str
    lengths: tuple[int, int]
    first_difference: int | None
    values: tuple[Any, Any] | None
    shared: int
    reused_blocks: int | None
    recomputed_from: int | None
    line: int | None
    column: int | None

    def sentences(self) -> list[str]:
        """The comparison in words, one finding a line."""
        a, b = self.lengths
        said = [f"the first prompt has {a} {self.unit}s, the second {b}"]
        if self.first_difference is None:
            said.append(f"no difference in the {self.shared} {self.unit}s that both have")
        else:
            assert self.values is not None
            place = "" if self.line is None else f" (line {self.line}, column {self.column})"
            said.append(
                f"first different {self.unit}: index {self.first_difference}{place},"
                f" {self.values[0]!r} against {self.values[1]!r}"
            )
        if self.reused_blocks is None:
            said.append(
                "these are texts: pass token ids, or --tokenizer, to see which blocks it costs"
            )
        else:
            said.append(
                f"blocks 0..{self.reused_blocks - 1} are reused"
                if self.reused_blocks
                else "no block is reused"
            )
            said.append(
                f"everything from block {self.reused_blocks}, token {self.recomputed_from},"
                " is computed again"
            )
        return said


def explain_tokens(a: Sequence[int], b: Sequence[int], block_tokens: int) -> Explanation:
    """Compare two token sequences; the last token of `b` is always computed."""
    shared = _shared(a, b)
    blocks = min(shared, max(0, len(b) - 1)) // block_tokens
    return _explanation("token", a, b, shared, blocks, blocks * block_tokens, None)


def explain_texts(a: str, b: str) -> Explanation:
    """Compare two texts by characters."""
    shared = _shared(a, b)
    return _explanation("character", a, b, shared, None, None, a)


def read_prompt(path: Path) -> list[int] | str:
    """Token ids (a JSON list, or an object with `tokens`), or else the text of the file.

    raises: ConfigError when the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot read {path}: {cause}") from cause
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(content, dict):
        content = cast("dict[str, Any]", content).get("tokens")
    if isinstance(content, list):
        items = cast("list[Any]", content)
        if all(isinstance(item, int) for item in items):
            return cast("list[int]", items)
    return text


def _shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def _explanation(
    unit: str,
    a: Sequence[Any],
    b: Sequence[Any],
    shared: int,
    blocks: int | None,
    start: int | None,
    text: str | None,
) -> Explanation:
    differs = shared < min(len(a), len(b))
    line = column = None
    if differs and text is not None:
        line = text.count("\n", 0, shared) + 1
        column = shared - (text.rfind("\n", 0, shared) + 1) + 1
    return Explanation(
        unit=unit,
        lengths=(len(a), len(b)),
        first_difference=shared if differs else None,
        values=(a[shared], b[shared]) if differs else None,
        shared=shared,
        reused_blocks=blocks,
        recomputed_from=start,
        line=line,
        column=column,
    )
