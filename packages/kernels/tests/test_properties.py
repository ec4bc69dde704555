"""What holds between results: rows stand alone, padding changes nothing, order does not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kernels import ops
from deepinfer_kernels.draw import seeded
from deepinfer_kernels.registry import default_registry, use

ROWWISE = {
    # operator: which arguments have one row a token; the others are shared by all rows
    "rms_norm": (0,),
    "rope": (0, 1, 2),
    "swiglu": (0, 1),
    "mhc_pre": (0,),
    "mhc_collapse": (0, 1),
    "mhc_post": (0, 1, 2, 3),
    "mla_sparse": (0, 2),
    "mla_decode_sparse": (0, 2, 5),
    "index_logits": (0, 1, 2, 3),
    "topk_select": (0,),
    "candidate_blocks": (0, 1),
    "candidate_mask": (0, 1),
    "fake_quant": (0,),
    "compress_pool": (0, 1),
    "engram_hash": (0,),
    "engram_gate": (0, 1, 2, 6),
    "moe_gate": (0,),
    "moe_experts": (0, 1, 2),
    "mhc_pre_norm": (0, 1),
    "mhc_post_pre_norm": (0, 1, 2, 3, 4),
    "norm_rope_quant": (0, 3, 4),
    "mla_query_key": (0, 6, 7),
    "mla_output": (0, 1, 2),
    "moe_layer": (0,),
    "rope_half": (0, 1, 2),
    "add_rms_norm": (0, 1),
    "silu_mul": (0,),
    "quant_linear": (0,),
    "qkv_rope_store": (0, 4, 5, 9),
}
FEW = 12
"""Rows up to which the operators that hold products keep their promise; torch's linear has none."""
NATIVE = [name for name in ROWWISE if default_registry.impls(name)["native"].unavailable() is None]
"""Forms that promise bit equality whatever the rest of the batch; torch's products do not."""

SEEDS = st.integers(0, 2**32)


def _rows(name: str, args: tuple[Any, ...], rows: torch.Tensor) -> tuple[Any, ...]:
    return tuple(
        arg[rows] if i in ROWWISE[name] and isinstance(arg, torch.Tensor) else arg
        for i, arg in enumerate(args)
    )


def _case(name: str, seed: int, dtype: torch.dtype) -> tuple[Any, ...]:
    args = default_registry.spec(name).cases(seeded(seed), dtype)
    return _rows(name, args, torch.arange(min(args[0].shape[0], FEW)))


def _results(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_all_row_wise_operators_are_covered() -> None:
    of_groups = {"kv_store", "kv_load", "gqa_attention", "index_topk", "grouped_mx_linear"}
    assert set(ROWWISE) | of_groups == set(default_registry.op_names())


@pytest.mark.parametrize("name", NATIVE)
@given(seed=SEEDS)
def test_permuting_the_batch_permutes_the_outputs_bit_for_bit(name: str, seed: int) -> None:
    fn = default_registry.impls(name)["native"].fn
    for dtype in (torch.float32, torch.bfloat16):
        args = _case(name, seed, dtype)
        n = args[0].shape[0]
        order = torch.randperm(n, generator=seeded(seed))
        straight = _results(fn(*args))
        permuted = _results(fn(*_rows(name, args, order)))
        for got, wanted in zip(permuted, straight, strict=True):
            assert torch.equal(got, wanted[order])


@pytest.mark.parametrize("name", NATIVE)
@given(seed=SEEDS)
def test_row_of_a_batch_equals_the_row_alone_bit_for_bit(name: str, seed: int) -> None:
    fn = default_registry.impls(name)["native"].fn
    args = _case(name, seed, torch.float32)
    whole = _results(fn(*args))
    for row in range(args[0].shape[0]):
        alone = _results(fn(*_rows(name, args, torch.tensor([row]))))
        for got, wanted in zip(alone, whole, strict=True):
            assert torch.equal(got[0], wanted[row])


BACKENDS = ("reference", "cpu", "native")


def _usable(op: str) -> list[str]:
    impls = default_registry.impls(op)
    return [b for b in BACKENDS if b in impls and impls[b].unavailable() is None]


@pytest.mark.parametrize("backend", _usable("mla_sparse"))
@given(seed=SEEDS)
def test_order_of_the_keys_and_padding_leave_attention_as_it_was(backend: str, seed: int) -> None:
    g = seeded(seed)
    q = torch.randn(3, 2, 16, generator=g, dtype=torch.float64)
    kv = torch.randn(20, 16, generator=g, dtype=torch.float64)
    sink = torch.randn(2, generator=g, dtype=torch.float64)
    idx = torch.stack([torch.randperm(20, generator=g)[:7] for _ in range(3)])
    padding = torch.full((3, 4), -1)
    mixed = torch.cat((idx, padding), dim=1)[:, torch.randperm(11, generator=g)]
    with use(backend=backend, op="mla_sparse"):
        plain = ops.mla_sparse(q, kv, idx, sink, 0.25)
        other = ops.mla_sparse(q, kv, mixed, sink, 0.25)
    for got, wanted in zip(other, plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", _usable("mla_sparse"))
@given(seed=SEEDS)
def test_attention_over_two_halves_joins_by_their_lse(backend: str, seed: int) -> None:
    g = seeded(seed)
    q = torch.randn(2, 3, 8, generator=g, dtype=torch.float64)
    kv = torch.randn(12, 8, generator=g, dtype=torch.float64)
    idx = torch.arange(12).expand(2, 12)
    no_sink = torch.full((3,), -torch.inf, dtype=torch.float64)
    with use(backend=backend, op="mla_sparse"):
        whole, lse = ops.mla_sparse(q, kv, idx, no_sink, 0.3)
        left, lse_left = ops.mla_sparse(q, kv, idx[:, :5], no_sink, 0.3)
        right, lse_right = ops.mla_sparse(q, kv, idx[:, 5:], no_sink, 0.3)
    torch.testing.assert_close(torch.logaddexp(lse_left, lse_right), lse)
    joined = (left * lse_left.exp().unsqueeze(-1) + right * lse_right.exp().unsqueeze(-1)) / (
        lse.exp().unsqueeze(-1)
    )
    torch.testing.assert_close(joined, whole)


@pytest.mark.parametrize("backend", _usable("rope"))
@given(seed=SEEDS)
def test_turning_back_undoes_the_rotation_and_keeps_lengths(backend: str, seed: int) -> None:
    g = seeded(seed)
    x = torch.randn(4, 3, 24, generator=g, dtype=torch.float64)
    angle = torch.rand(4, 5, generator=g, dtype=torch.float64) * 6.28
    with use(backend=backend, op="rope"):
        turned = ops.rope(x, angle.cos(), angle.sin())
        back = ops.rope(turned, angle.cos(), angle.sin(), inverse=True)
    assert torch.equal(turned[..., :14], x[..., :14])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("backend", _usable("mhc_pre"))
@given(seed=SEEDS)
def test_mixes_are_doubly_stochastic(backend: str, seed: int) -> None:
    spec = default_registry.spec("mhc_pre")
    args = list(spec.cases(seeded(seed), torch.float64))
    args[4:] = [1e-20, 1e-6, 200]
    with use(backend=backend, op="mhc_pre"):
        pre, post, comb = ops.mhc_pre(*args)
    ones = torch.ones(comb.shape[:2], dtype=torch.float64)
    torch.testing.assert_close(comb.sum(1), ones, atol=1e-4, rtol=0)
    torch.testing.assert_close(comb.sum(2), ones, atol=1e-2, rtol=0)
    assert (pre > 0).all()
    assert ((post >= 0) & (post <= 2)).all()


@pytest.mark.parametrize("backend", _usable("topk_select"))
@given(
    values=st.lists(
        st.sampled_from([-1.0, -0.0, 0.0, 0.5, float("-inf"), float("nan"), 3e38]), max_size=20
    ),
    k=st.integers(0, 25),
)
def test_selection_is_the_stable_sort_of_python(backend: str, values: list[float], k: int) -> None:
    eligible = [i for i, value in enumerate(values) if value > float("-inf")]
    best = sorted(sorted(eligible, key=lambda i: -values[i])[:k])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        with use(backend=backend, op="topk_select"):
            got = ops.topk_select(torch.tensor([values], dtype=dtype).view(1, -1), k)
        assert got.tolist() == [best + [-1] * (k - len(best))]


@pytest.mark.parametrize("backend", _usable("kv_store"))
@pytest.mark.parametrize("record", ["fp8", "fp4", "index_fp4", "raw"])
@given(seed=SEEDS)
def test_stored_rows_come_back_as_their_fake_quantisation(
    backend: str, record: str, seed: int
) -> None:
    from deepinfer_kernels import formats

    g = seeded(seed)
    dtype = (torch.float32, torch.bfloat16, torch.float64)[seed % 3]
    pages, entries, dim = 3, 5, 32
    section = formats.section_bytes(record, dim, entries, dtype)
    buffer = torch.randint(0, 256, (pages, section + 64), generator=g, dtype=torch.uint8)
    cache = buffer[:, 32 : 32 + section]
    before = buffer.clone()
    slot = torch.randperm(pages * entries, generator=g)[:8]
    slot[::3] = -1
    x = torch.randn(8, dim, generator=g, dtype=torch.float64).to(dtype)
    with use(backend=backend, op="kv_store"), use(backend=backend, op="kv_load"):
        ops.kv_store(x, cache, slot, record, entries)
        loaded = ops.kv_load(cache, slot.view(2, 4), record, dim, dtype, entries)
    wanted = formats.fake_quant(x, record).masked_fill((slot < 0).unsqueeze(-1), 0)
    assert torch.equal(loaded.view(8, dim), wanted)
    changed = int((buffer != before).sum())
    assert changed <= int((slot >= 0).sum()) * formats.record_bytes(record, dim, dtype)
    assert torch.equal(buffer[:, :32], before[:, :32])
    assert torch.equal(buffer[:, 32 + section :], before[:, 32 + section :])
