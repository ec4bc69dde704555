"""What a long prompt writes: blocks, and next to nothing else. Real writer, zeros for data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from released_config import RELEASED
from toy_engine import greedy, request

from deepinfer_engine.adapters.kvtier import StoreSettings, open_store
from deepinfer_engine.core.runner import BLOCK_TOKENS, CacheLayout
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.demo import demo_path
from deepinfer_engine.kv.connector import KVConnector
from deepinfer_engine.model.v41.config import ModelConfig, TextConfig, load_config
from deepinfer_engine.model.v41.layout import build_layout

PROMPT, ANSWER = 77_000, 300
STEP = 16
"""Blocks of one prefill step."""


def layout_of(config: TextConfig) -> CacheLayout:
    return build_layout(config, dtype=torch.bfloat16, cache_quant="reference", fingerprint="zeros")


def written(path: Path, layout: CacheLayout, persist: str) -> int:
    """Bytes of all files after a prompt and its answer went through the connector."""
    zeros = bytearray(max(layout.block_bytes, layout.state_bytes))
    runner = SimpleNamespace(
        layout=layout,
        block_bytes=lambda _: memoryview(zeros)[: layout.block_bytes],
        state_bytes=lambda _: memoryview(zeros)[: layout.state_bytes],
    )
    small = StoreSettings(path, memory_bytes=16 << 20, window_bytes=16 << 20)
    connector = KVConnector(
        open_store(small, layout), runner, max_bytes_in_flight=1 << 40, persist_state=persist
    )
    sequence = LiveSequence(request("r", [7] * PROMPT, greedy()), "r", 0.0)
    whole = PROMPT // BLOCK_TOKENS
    for first in range(0, whole, STEP):
        blocks = range(first, min(first + STEP, whole))
        states = [((b + 1) * BLOCK_TOKENS, 1) for b in blocks if b >= whole - 4 or persist == "all"]
        connector.publish(sequence, [(b, b) for b in blocks], states)
    sequence.tokens += [7] * ANSWER
    for block in range(whole, (PROMPT + ANSWER) // BLOCK_TOKENS):
        connector.publish(sequence, [(block, block)], [((block + 1) * BLOCK_TOKENS, 1)])
    sequence.finish_reason = "stop"
    connector.publish(sequence, [], [])
    connector.flush()
    connector.close()  # gives back what the open segment had reserved
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize(("persist", "most"), [("last", 1.1), ("none", 1.02)])
def test_the_released_layout_writes_its_blocks_and_at_most_a_tenth_more(
    tmp_path: Path, persist: str, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = layout_of(ModelConfig.model_validate(RELEASED).text_config)
    assert (layout.block_bytes, layout.state_bytes) == (113_920, 3_128_384)
    blocks = (PROMPT + ANSWER) // BLOCK_TOKENS * layout.block_bytes
    share = written(tmp_path / "kv", layout, persist) / blocks
    with capsys.disabled():
        print(f"\nreleased layout, {PROMPT} + {ANSWER} tokens, {persist}: {share:.3f} x its blocks")
    assert 1 <= share <= most


def test_what_the_embedded_model_writes_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = layout_of(load_config(demo_path()).text_config)
    tokens = (PROMPT + ANSWER) // BLOCK_TOKENS * BLOCK_TOKENS
    each = {p: written(tmp_path / p, layout, p) / tokens for p in ("all", "last", "none")}
    with capsys.disabled():
        told = ", ".join(f"{persist} {size:.0f}" for persist, size in each.items())
        print(f"\nembedded model, bytes a token on disk: {told}")
    assert each["none"] <= each["last"] < each["all"] / 5
