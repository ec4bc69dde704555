"""End-of-text ids: config files give one number, a list, or nothing."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _as_list(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


EosIds = Annotated[
    tuple[Annotated[int, Field(ge=0, strict=True)], ...],
    BeforeValidator(_as_list),
    Field(max_length=64),
]
