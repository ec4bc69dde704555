"""Reading JSON values of unknown shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast


def as_object(value: object) -> Mapping[str, Any] | None:
    """The value as a JSON object, None for anything else."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


def as_list(value: object) -> Sequence[Any] | None:
    """The value as a JSON array, None for anything else."""
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return cast("Sequence[Any]", value) if is_list else None
