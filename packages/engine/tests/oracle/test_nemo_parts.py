"""Parts that must be exact beside NeMo's: n-gram rows, cache rounding, rotary frequencies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import nemo
import numpy as np
import pytest
import torch
from conftest import Record
from released_config import RELEASED
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor

# isort: split
from nemo_automodel.components.models.deepseek_v41.attention import _RotaryEmbedding
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41TextConfig
from nemo_automodel.components.models.deepseek_v41.engram import DeepseekV41NgramHash
from transformers import PreTrainedTokenizerFast

from deepinfer_engine.adapters.kernels import Operators
from deepinfer_engine.model.files import load_tokenizer
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.v41.batch import Batch
from deepinfer_engine.model.v41.config import ModelConfig, TextConfig, load_config
from deepinfer_engine.model.v41.engram import Engram
from deepinfer_engine.model.v41.rope import Rope

Quantised = Callable[[int], Path]
ops = Operators("cpu")


def our_rows(config: TextConfig, tokenizer: Tokenizer, ids: np.ndarray, cut: int) -> list[Tensor]:
    """Rows of each Engram layer, the sequence fed in two pieces; id -1 is no text token."""
    engram = Engram(config, tokenizer, ops)
    whole: list[list[Tensor]] = [[] for _ in config.engram_layer_ids]
    for start, end in ((0, cut), (cut, len(ids))):
        before = tuple(ids[max(0, start - config.lookback) : start].tolist())
        piece = Batch(config, [SequenceRows(ids[start:end], start, before, [1, 2, 3], 1)])
        grams = engram.compressed(piece.grams(config.lookback))
        for i, layer in enumerate(config.engram_layer_ids):
            whole[i].append(engram.rows(layer, grams))
    return [torch.cat(pieces) for pieces in whole]


def their_rows(config: TextConfig, tokenizer: Tokenizer, ids: np.ndarray) -> list[Tensor]:
    keys = DeepseekV41TextConfig(**config.model_dump())
    hashes = DeepseekV41NgramHash(keys, PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    known = torch.from_numpy(ids >= 0)
    tokens = torch.from_numpy(ids).clamp(min=0)
    return list(hashes(tokens[None], token_mask=known[None])[0].unbind(1))


@pytest.mark.parametrize("seed", range(3))
def test_ngram_rows_of_the_tiny_model(quantised: Quantised, record: Record, seed: int) -> None:
    config = load_config(quantised(0)).text_config
    tokenizer = load_tokenizer(quantised(0))
    rng = np.random.default_rng(seed)
    ids = np.where(rng.random(300) < 0.1, -1, rng.integers(0, 320, size=300))
    ours, theirs = our_rows(config, tokenizer, ids, 100 + seed), their_rows(config, tokenizer, ids)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        record("n-gram rows of the tiny tables", mine, other)


def released_vocabulary() -> Tokenizer:
    """99,092 tokens that all read differently: the released tables' multipliers and primes."""
    vocab = {f"t{i:x}": i for i in range(99092)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("t2", special=True)])
    return tokenizer


def test_ngram_rows_of_the_released_tables(record: Record) -> None:
    config = ModelConfig.model_validate(RELEASED).text_config
    tokenizer = released_vocabulary()
    ids = np.random.default_rng(0).integers(0, 99092, size=300)
    ours, theirs = our_rows(config, tokenizer, ids, 77), their_rows(config, tokenizer, ids)
    for layer, mine, other in zip(config.engram_layer_ids, ours, theirs, strict=True):
        assert torch.equal(mine, other)
        record(f"n-gram rows of the released table {layer}", mine, other)


def crafted_blocks() -> Iterator[tuple[str, Tensor]]:
    """float32 [n, 64] where rounding is decided by rules, not by luck."""
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(2000, 64, generator=draw)
    powers = torch.ldexp(torch.ones(249, 1), torch.arange(-149.0, 100.0)[:, None]).expand(-1, 64)
    yield "zeros", torch.zeros(4, 64)
    yield "negative zeros", -torch.zeros(4, 64)
    for factor in (1.0, 1.5, 6.0, 448.0):
        yield f"powers of two times {factor}", powers * factor
    yield "subnormals", normal * 1e-40
    yield "huge", normal * 1e30
    yield "bfloat16 values", normal.bfloat16().float()
    for exponent in (-126, -20, -9, 0, 9, 30):
        yield f"normal times 2^{exponent}", torch.ldexp(normal, torch.tensor(exponent))
    quarters = torch.randint(-24, 25, (500, 64), generator=draw) / 4.0
    quarters[:, ::16] = 6.0  # pins the scale, so that odd quarters lie between two codes
    sixteenths = (torch.randint(128, 448, (500, 64), generator=draw) + 0.0) / 16
    sixteenths[:, ::16] = 28.0
    for exponent in (-12, -3, 0, 5, 14):
        yield f"ties of E2M1 times 2^{exponent}", torch.ldexp(quarters, torch.tensor(exponent))
        yield f"ties of E4M3 times 2^{exponent}", torch.ldexp(sixteenths, torch.tensor(exponent))


@pytest.mark.parametrize(
    ("ours", "theirs", "block"),
    [("fp8", "fp8", 32), ("fp4", "nvfp4", 16), ("index_fp4", "mxfp4", 32)],
)
def test_cache_rounding_bit_for_bit(record: Record, ours: str, theirs: str, block: int) -> None:
    mine, other = [], []
    for name, x in crafted_blocks():
        got = ops.fake_quant(x.contiguous(), ours)
        want = nemo.quantize_cache(x, format=theirs, block_size=block)
        assert torch.equal(got.view(torch.int32), want.contiguous().view(torch.int32)), name
        mine.append(got)
        other.append(want)
    record(f"cache rounding {ours} of crafted blocks", torch.cat(mine), torch.cat(other))


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "yarn"])
def test_rotary_angles_of_the_released_model(record: Record, compressed: bool) -> None:
    """At position 1 the angle is the frequency; NeMo's float32 angles grow coarse with position."""
    config = ModelConfig.model_validate(RELEASED).text_config
    rotary = _RotaryEmbedding(DeepseekV41TextConfig(**config.model_dump()), compressed=compressed)
    for position, tolerance in ((1, 1e-6), (1000, 1e-3)):
        angles = rotary(torch.tensor([[position]]))[0].double()
        cos, sin = Rope(config, compressed=compressed, dtype=torch.float64).at(
            torch.tensor([position])
        )
        what = f"rotary cos and sin, {'YaRN' if compressed else 'plain'}, position {position}"
        both = torch.cat([cos, sin]), torch.cat([angles.cos(), angles.sin()])
        assert record(what, *both)[0] < tolerance
