"""Operators of dense families: grouped-query attention over pages, rotations, stored weights."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deepinfer_kernels import formats, ops
from deepinfer_kernels.draw import seeded
from deepinfer_kernels.errors import RecordError, ShapeError
from deepinfer_kernels.formats.stored import int8_rounded, unpack_weight
from deepinfer_kernels.registry import default_registry, use

RUNNABLE = [
    backend
    for backend in ("reference", "native")
    if default_registry.impls("gqa_attention")[backend].unavailable() is None
]


@pytest.fixture(params=RUNNABLE, autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with use(backend=request.param):
        yield request.param


def _paged(
    parts: list[tuple[int, int]], entries: int = 16, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, keys, values, table, start, first) of sequences given as (tokens there, new rows)."""
    g = seeded(7)
    used = [-(-(past + rows) // entries) for past, rows in parts]
    pages = torch.randperm(sum(used), generator=g).split(used)
    table = torch.full((len(parts), max(used)), -1)
    for s, ids in enumerate(pages):
        table[s, : len(ids)] = ids
    blocks = torch.randn(sum(used), 2, entries, 2, 8, generator=g, dtype=dtype)
    first = torch.tensor([0, *(rows for _, rows in parts)]).cumsum(0)
    q = torch.randn(int(first[-1]), 6, 8, generator=g, dtype=dtype)
    return q, blocks[:, 0], blocks[:, 1], table, torch.tensor([p for p, _ in parts]), first


def test_mixed_prefill_chunk_and_decode_equal_dense_attention_of_each_sequence() -> None:
    parts = [(0, 21), (40, 1), (15, 1), (16, 5), (3, 0), (31, 18)]
    q, keys, values, table, start, first = _paged(parts)
    out = ops.gqa_attention(q, keys, values, table, start, first, 0.3)
    for s, (past, rows) in enumerate(parts):
        k = keys[table[s]].flatten(0, 1)[: past + rows].transpose(0, 1)
        v = values[table[s]].flatten(0, 1)[: past + rows].transpose(0, 1)
        own = slice(int(first[s]), int(first[s + 1]))
        seen = torch.arange(past + rows) <= past + torch.arange(rows)[:, None]
        wanted = scaled_dot_product_attention(
            q[own].transpose(0, 1), k, v, attn_mask=seen, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[own], wanted.transpose(0, 1))


def test_row_of_attention_does_not_depend_on_its_neighbours_or_its_chunk() -> None:
    parts = [(0, 21), (40, 1), (31, 18)]
    q, keys, values, table, start, first = _paged(parts, dtype=torch.float32)
    together = ops.gqa_attention(q, keys, values, table, start, first, 0.3)
    for s, (past, rows) in enumerate(parts):
        for i in range(rows):
            row = int(first[s]) + i
            alone = ops.gqa_attention(
                q[row : row + 1],
                keys,
                values,
                table[s : s + 1],
                torch.tensor([past + i]),
                torch.tensor([0, 1]),
                0.3,
            )
            if default_registry.choose("gqa_attention").impl.backend == "native":
                assert torch.equal(alone[0], together[row])
            torch.testing.assert_close(alone[0], together[row])


def test_keys_that_a_row_does_not_see_cannot_reach_it_as_nan() -> None:
    q, keys, values, table, start, first = _paged([(0, 21), (40, 1)])
    whole = ops.gqa_attention(q, keys, values, table, start, first, 0.3)
    place = keys[table[0, 1], 4], values[table[0, 1], 4]  # position 20, the last row of sequence 0
    for entry in place:
        entry.fill_(math.nan)
    keys[table[1, 2], 9:] = math.nan  # behind the keys of sequence 1: not written yet
    out = ops.gqa_attention(q, keys, values, table, start, first, 0.3)
    assert torch.equal(out[:20], whole[:20])
    assert torch.equal(out[21:], whole[21:])
    assert out[20].isnan().all()


def test_pages_outside_the_cache_and_short_tables_are_errors() -> None:
    q, keys, values, table, start, first = _paged([(20, 2)])
    for wrong in (torch.full_like(table, 99), torch.full_like(table, -1), table[:, :1]):
        with pytest.raises(IndexError):
            ops.gqa_attention(q, keys, values, wrong, start, first, 0.3)
    with pytest.raises(ShapeError, match="2 key heads divide the heads of q, got 5"):
        ops.gqa_attention(q[:, :5], keys, values, table, start, first, 0.3)
    with pytest.raises(
        ShapeError, match=r"keys is torch\.float64 like the rows, got torch\.float32"
    ):
        ops.gqa_attention(q, keys.float(), values, table, start, first, 0.3)


def test_no_sequence_at_all_is_no_error() -> None:
    q, keys, values, table, start, first = _paged([(20, 2)])
    out = ops.gqa_attention(q[:0], keys, values, table[:0], start[:0], first[:1], 0.3)
    assert out.shape == (0, 6, 8)


@pytest.mark.parametrize("adjacent", [False, True])
def test_both_rotations_turn_the_same_pairs_in_other_places(adjacent: bool) -> None:
    g = seeded(1)
    qkv = torch.randn(3, 4, 8, generator=g)
    angle = torch.rand(3, 4, generator=g)
    cache = torch.zeros(2, 2, 4, 1, 8)
    q = ops.qkv_rope_store(
        qkv, None, None, 1e-6, angle.cos(), angle.sin(), adjacent, cache[:, 0], cache[:, 1],
        torch.tensor([5, -1, 0]),
    )  # fmt: skip
    turn = torch.complex(angle.cos(), angle.sin())[:, None]

    def pairs(x: Tensor) -> Tensor:
        split = x.unflatten(-1, (4, 2)) if adjacent else x.unflatten(-1, (2, 4)).transpose(-1, -2)
        return torch.view_as_complex(split.contiguous())

    torch.testing.assert_close(pairs(q), pairs(qkv[:, :2]) * turn)
    torch.testing.assert_close(pairs(cache[1, 0, 1]), (pairs(qkv[:, 2:3]) * turn)[0])
    torch.testing.assert_close(pairs(cache[0, 0, 0]), (pairs(qkv[:, 2:3]) * turn)[2])
    assert torch.equal(cache[1, 1, 1], qkv[0, 3:])
    written = torch.zeros(2, 2, 4, dtype=torch.bool)
    written[1, :, 1] = written[0, :, 0] = True
    assert not cache[~written].any()


def test_slot_past_the_cache_writes_nothing() -> None:
    cache = torch.zeros(2, 2, 4, 1, 8)
    angle = torch.rand(2, 4)
    with pytest.raises(IndexError, match="a slot is past the 2 pages of 4 entries"):
        ops.qkv_rope_store(
            torch.ones(2, 4, 8), None, None, 1e-6, angle, angle, False, cache[:, 0], cache[:, 1],
            torch.tensor([0, 8]),
        )  # fmt: skip
    assert not cache.any()


def _half(value: float) -> bytes:
    return struct.pack("<e", value)


def test_stored_blocks_have_the_published_layout() -> None:
    numbers = bytes(i | (15 - i) << 4 for i in range(16))
    want = [float(i) for i in range(16)] + [float(15 - i) for i in range(16)]
    for stored, block, wanted in (
        ("q4_0", _half(0.5) + numbers, [0.5 * (v - 8) for v in want]),
        ("q4_1", _half(0.5) + _half(-3) + numbers, [0.5 * v - 3 for v in want]),
        ("q8_0", _half(0.25) + bytes(range(240, 256)) + bytes(range(16)),
         [0.25 * v for v in (*range(-16, 0), *range(16))]),
    ):  # fmt: skip
        weight = torch.tensor(list(block), dtype=torch.uint8)[None]
        assert formats.widen_weight(weight, stored, 32, torch.float32)[0].tolist() == wanted
        got = ops.quant_linear(torch.eye(32), weight, stored, None, True)
        assert got.flatten().tolist() == wanted


@given(seed=st.integers(0, 2**32), stored=st.sampled_from([*formats.STORED, "bf16"]))
def test_storing_rounds_each_weight_to_the_nearest_of_its_block(seed: int, stored: str) -> None:
    weight = torch.randn(3, 64, generator=seeded(seed))
    weight[0, :32] = 0
    back = formats.widen_weight(formats.store_weight(weight, stored), stored, 64, torch.float32)
    spread = weight.view(3, 2, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32).reshape(3, 64)
    steps = {"q8_0": 1 / 127, "q4_0": 1 / 7, "q4_1": 2 / 15, "bf16": 2**-8}[stored]
    assert ((back - weight).abs() <= spread * steps * 1.01).all()


@given(seed=st.integers(0, 2**32))
def test_exact_product_is_that_of_the_widened_weight(seed: int) -> None:
    g = seeded(seed)
    x = torch.randn(5, 96, generator=g, dtype=torch.float64)
    for stored in (*formats.STORED, "bf16"):
        weight = formats.store_weight(torch.randn(7, 96, generator=g), stored)
        wide = formats.widen_weight(weight, stored, 96, torch.float64)
        torch.testing.assert_close(ops.quant_linear(x, weight, stored), x @ wide.T)
        torch.testing.assert_close(
            ops.quant_linear(x.float(), weight, stored, None, True).double(),
            x.float().double() @ wide.T,
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("stored", list(formats.STORED))
@pytest.mark.parametrize(("n", "rows"), [(1, 1), (7, 15), (8, 16), (9, 17), (17, 33)])
def test_panels_with_rows_left_over_compute_every_product(stored: str, n: int, rows: int) -> None:
    g = seeded(n)
    x = torch.randn(n, 96, generator=g)
    weight = formats.store_weight(torch.randn(rows, 96, generator=g), stored)
    wide = formats.widen_weight(weight, stored, 96, torch.float64)
    bias = torch.randn(rows, generator=g)
    got = ops.quant_linear(x, weight, stored, bias)
    wanted = int8_rounded(x).double() @ wide.T + bias
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("stored", list(formats.STORED))
@pytest.mark.parametrize("n", [1, 7, 8, 9])
@pytest.mark.parametrize("exact", [False, True])
def test_packed_rows_give_the_bits_of_plain_ones(stored: str, n: int, exact: bool) -> None:
    g = seeded(n)
    x = torch.randn(n, 96, generator=g)
    plain = formats.store_weight(torch.randn(48, 96, generator=g), stored)
    packed = formats.pack_weight(plain, stored)
    assert packed.shape == plain.shape
    assert torch.equal(unpack_weight(packed, stored + formats.PACKED), plain)
    got = ops.quant_linear(x, packed, stored + formats.PACKED, None, exact)
    assert torch.equal(got, ops.quant_linear(x, plain, stored, None, exact))


def test_rows_that_make_no_group_are_not_packed() -> None:
    weight = formats.store_weight(torch.randn(17, 32), "q8_0")
    with pytest.raises(RecordError, match="16 rows"):
        formats.pack_weight(weight, "q8_0")
    with pytest.raises(ShapeError, match="groups of 16"):
        ops.quant_linear(torch.randn(1, 32), weight, "q8_0x16")


def test_nan_and_infinity_in_an_activation_make_its_row_nan_and_no_other() -> None:
    x = torch.randn(3, 64, generator=seeded(3))
    x[0, 5], x[2, 40] = math.nan, math.inf
    weight = formats.store_weight(torch.randn(4, 64, generator=seeded(4)), "q8_0")
    out = ops.quant_linear(x, weight, "q8_0")
    assert out[0].isnan().all()
    assert out[2].isnan().all()
    assert out[1].isfinite().all()


def test_misuse_of_stored_weights_is_one_clear_error() -> None:
    x, weight = torch.zeros(2, 64), torch.zeros(3, 36, dtype=torch.uint8)
    with pytest.raises(RecordError, match="no stored form 'q5_1' of a weight; there are: q8_0"):
        ops.quant_linear(x, weight, "q5_1")
    with pytest.raises(RecordError, match="a q4_0 row holds a multiple of 32 channels, got 40"):
        ops.quant_linear(x[:, :40], weight, "q4_0")
    with pytest.raises(ShapeError, match=r"weight is \[\*, 68\], got \[3, 36\]"):
        ops.quant_linear(x, weight, "q8_0")
    with pytest.raises(ShapeError, match=r"residual is torch\.float32 like x"):
        ops.add_rms_norm(x, x.double(), torch.ones(64), 1e-6)
    with pytest.raises(ShapeError, match=r"gate_up is \[\.\.\., 2 I\], got \[2, 63\]"):
        ops.silu_mul(x[:, :63])
