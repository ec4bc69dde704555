"""Bounded replay beside NeMo, which has none: there each row of the consumer layers gets the window
that replay leaves it. NeMo subtracts the window from the positions of all rows at once, so a column
of windows serves as well as one number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nemo
import pytest
import torch
from conftest import Record
from tiny_tokens import tokens
from torch import Tensor

from deepinfer_engine import load_model
from deepinfer_engine.model.family import ReplayMode
from deepinfer_engine.model.v41.config import TextConfig

PROMPT, ANSWER, KEEP = 150, 12, 40


def row_windows(config: TextConfig, prompt: int, keep: int, total: int) -> Tensor:
    """[total, 1]: window keys of each row of a consumer layer.

    No key before the last `keep` tokens of the prompt exists there; rows before them see none.
    """
    position, first = torch.arange(total), max(0, prompt - keep)
    return (position - first + 1).clamp(min=0, max=config.sliding_window)[:, None]


@contextmanager
def consumer_windows(model: Any, config: TextConfig, windows: Tensor) -> Iterator[None]:
    consumers = [
        layer.attn for i, layer in enumerate(model.model.layers.values()) if i >= config.n_producers
    ]
    for attention in consumers:
        attention.window_size = windows
    try:
        yield
    finally:
        for attention in consumers:
            attention.window_size = config.sliding_window


@pytest.mark.parametrize("mode", ["mask", "compact"])
@pytest.mark.parametrize("cuts", [[], [30, 64, 109, 111, 131]], ids=["one chunk", "chunks"])
def test_logits_of_replayed_prompts_and_their_answers(
    quantised: Callable[..., Path], record: Record, mode: ReplayMode, cuts: list[int]
) -> None:
    ids = tokens(2, PROMPT + ANSWER)
    theirs = nemo.backbone(quantised(0))
    model = load_model(quantised(0), dtype="float32", cache_quant="none", replay=mode, keep=KEEP)
    text = model.config.text_config
    windows = row_windows(text, PROMPT, KEEP, len(ids))
    with nemo.rounding(nemo.unrounded):
        whole = nemo.logits(theirs, ids)
        with consumer_windows(theirs, text, windows):
            expected = nemo.logits(theirs, ids)
    assert (expected - whole)[PROMPT - KEEP : PROMPT].abs().max() > 0.1, "replay approximates"

    cache, rows = None, torch.empty(0, text.vocab_size)
    for start, end in zip([0, *cuts], [*cuts, PROMPT], strict=True):
        logits, cache = model.prefill(ids[start:end], cache=cache, prompt_len=PROMPT)
        rows = torch.cat([rows, logits])
    assert cache is not None
    kept = rows[-KEEP:]
    answer = torch.cat([model.decode(cache, [token]) for token in ids[PROMPT:].tolist()])
    what = f"logits of the {KEEP} kept rows and {ANSWER} answered, bounded replay"
    got = torch.cat([kept, answer])
    assert record(what, got, expected[PROMPT - KEEP :])[0] < 1e-4
