"""Quality flags of a record in one byte: was it computed from approximate windows, how deep."""

from __future__ import annotations

from typing import Final

APPROXIMATE_BIT: Final = 0x80
GENERATION_BITS: Final = 0x7F
NO_ROW: Final = 0xFFFFFFFF
"""In the `length` of a row: no such record."""


def marks_of(approximate: bool, generation: int) -> int:
    """Approximate bit and replay generation, saturating, in one byte."""
    return (APPROXIMATE_BIT if approximate else 0) | min(generation, GENERATION_BITS)
