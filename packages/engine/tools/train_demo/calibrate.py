"""Temperatures of the confidence head, fitted on held-out text."""

from __future__ import annotations

from tokenizers import Tokenizer
from twin import Twin


def calibrate(twin: Twin, tokenizer: Tokenizer) -> list[float]:
    raise SystemExit("later")
