"""Text of a peer in our log and our errors: one line, no control characters, not much of it."""

from __future__ import annotations

MAX_CHARACTERS = 300


def quoted(value: object) -> str:
    """`value` as text that can stand in a log line, whoever wrote it."""
    text = str(value)
    cut = text[:MAX_CHARACTERS]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    return shown if len(text) == len(cut) else shown + "..."
