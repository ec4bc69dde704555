"""Claims about single operators, on every back end that runs here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from deepinfer_kernels import ops
from deepinfer_kernels.draw import seeded
from deepinfer_kernels.errors import RecordError, ShapeError
from deepinfer_kernels.registry import default_registry, use

RUNNABLE = [
    backend
    for backend in ("reference", "cpu", "native")
    if default_registry.impls("mla_sparse")[backend].unavailable() is None
]


@pytest.fixture(params=RUNNABLE, autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with use(backend=request.param):
        yield request.param


def test_zero_row_stays_zero_under_a_vanishing_epsilon() -> None:
    assert torch.equal(ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-20), torch.zeros(2, 8))


def test_rotation_of_a_quarter_turn_swaps_each_pair() -> None:
    x = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0]])
    turned = ops.rope(x, torch.zeros(1, 2), torch.ones(1, 2))
    assert turned.tolist() == [[9.0, -2.0, 1.0, -4.0, 3.0]]


def test_activation_is_clamped_above_on_the_gate_and_on_both_sides_of_the_value() -> None:
    gate, up = torch.tensor([50.0, -50.0, 1.0]), torch.tensor([50.0, 3.0, -50.0])
    silu = [v / (1 + math.exp(-v)) for v in (10.0, -50.0, 1.0)]
    wanted = torch.tensor([silu[0] * 10, silu[1] * 3, silu[2] * -10])
    torch.testing.assert_close(ops.swiglu(gate, up, 10.0), wanted)


def test_expansion_sums_over_the_first_axis_of_the_mix() -> None:
    streams = torch.tensor([[[1.0], [10.0]]])
    comb = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    out = ops.mhc_post(torch.tensor([[100.0]]), streams, torch.tensor([[1.0, 0.5]]), comb)
    assert out.flatten().tolist() == [100 + 1 + 30, 50 + 2 + 40]


def test_sink_takes_its_share_and_lse_leaves_it_out() -> None:
    q, kv = torch.zeros(1, 1, 4), torch.tensor([[1.0, 0, 0, 0], [3.0, 0, 0, 0]])
    out, lse = ops.mla_sparse(q, kv, torch.tensor([[0, 1]]), torch.zeros(1), 1.0)
    torch.testing.assert_close(out[0, 0, 0], torch.tensor(4 / 3))  # (1 + 3) / (1 + 1 + e^0)
    torch.testing.assert_close(lse, torch.tensor([[math.log(2)]]))


def test_row_without_any_key_gives_zero_and_infinite_lse() -> None:
    q, kv = torch.randn(2, 3, 8, generator=seeded(0)), torch.randn(4, 8, generator=seeded(1))
    out, lse = ops.mla_sparse(q, kv, torch.tensor([[-1, -1], [2, -1]]), torch.zeros(3), 1.0)
    assert torch.equal(out[0], torch.zeros(3, 8))
    assert lse[0].tolist() == [math.inf] * 3
    assert lse[1].isfinite().all()
    for empty in (kv[:0], kv):
        idx = torch.full((2, 0 if len(empty) else 3), -1)
        out, lse = ops.mla_sparse(q, empty, idx, torch.zeros(3), 1.0)
        assert not out.any()
        assert (lse == math.inf).all()


def test_stale_nan_in_rows_nobody_attends_to_does_not_leak() -> None:
    kv = torch.randn(40, 8, generator=seeded(1))
    kv[0], kv[39] = math.nan, math.inf
    for n in (2, 16):
        q = torch.randn(n, 2, 8, generator=seeded(0))
        idx = torch.tensor([[3, -1, 7] + [-1] * 20]).expand(n, -1)
        out, lse = ops.mla_sparse(q, kv, idx, torch.zeros(2), 1.0)
        assert out.isfinite().all()
        assert lse.isfinite().all()


def test_sink_far_above_every_key_silences_the_row_but_not_its_lse() -> None:
    q, kv = torch.zeros(1, 1, 4), torch.ones(2, 4)
    out, lse = ops.mla_sparse(q, kv, torch.tensor([[0, 1]]), torch.tensor([500.0]), 1.0)
    assert not out.any()
    torch.testing.assert_close(lse, torch.tensor([[math.log(2)]]))


def test_many_rows_are_computed_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    g = seeded(5)
    q = torch.randn(50, 2, 16, generator=g)
    kv = torch.randn(300, 16, generator=g)
    idx = torch.randint(-1, 300, (50, 20), generator=g)
    whole = ops.mla_sparse(q, kv, idx, torch.zeros(2), 0.25)
    for module in ("reference", "cpu"):
        form = import_module(f"deepinfer_kernels.ops.mla_sparse.{module}")
        monkeypatch.setattr(form, "CHUNK_BYTES", 1 << 12)
    pieces = ops.mla_sparse(q, kv, idx, torch.zeros(2), 0.25)
    for got, wanted in zip(pieces, whole, strict=True):
        torch.testing.assert_close(got, wanted)


def test_index_past_the_keys_raises_and_names_the_operator(backend: str) -> None:
    q, kv = torch.zeros(9, 1, 4), torch.zeros(3, 4)
    for idx in (torch.full((9, 2), 3), torch.full((9, 1), 2**40)):
        with pytest.raises(IndexError):
            ops.mla_sparse(q, kv, idx, torch.zeros(1), 1.0)


def test_logits_ignore_negative_products_and_hide_the_future() -> None:
    q = torch.tensor([[[[1.0], [-1.0]]]])
    k = torch.tensor([[[2.0], [-3.0], [5.0]]])
    w = torch.tensor([[[10.0, -1.0]]])
    logits = ops.index_logits(q, k, w, torch.tensor([[2]]))
    assert logits.tolist() == [[[20.0, -3.0, -math.inf]]]


def test_ties_go_to_the_lower_index_and_both_zeros_tie() -> None:
    x = torch.tensor([[0.0, -0.0, 0.0, 1.0, -0.0]])
    assert ops.topk_select(x, 3).tolist() == [[0, 1, 3]]


def test_rows_with_fewer_entries_than_k_are_padded() -> None:
    x = torch.tensor([[-math.inf, 2.0, -math.inf, 1.0], [-math.inf] * 4])
    assert ops.topk_select(x, 3).tolist() == [[1, 3, -1], [-1, -1, -1]]
    assert ops.topk_select(x[:, :0], 2).tolist() == [[-1, -1], [-1, -1]]


def test_block_of_the_newest_visible_entry_is_kept_before_better_ones() -> None:
    x = torch.tensor([[9.0, 9.0, 8.0, 8.0, 0.0, 0.0, 99.0, 99.0]])
    kept = ops.candidate_blocks(x, torch.tensor([5]), 2, 2)
    assert kept.tolist() == [[True, False, True, False]]
    assert not ops.candidate_blocks(x, torch.tensor([0]), 2, 4).any()


def test_block_ties_go_to_the_lower_block_and_few_blocks_are_all_kept() -> None:
    x = torch.zeros(1, 8)
    kept = ops.candidate_blocks(x, torch.tensor([8]), 2, 3)
    assert kept.tolist() == [[True, True, False, True]]
    assert ops.candidate_blocks(x, torch.tensor([8]), 2, 9).all()


def test_visible_block_of_hidden_logits_still_counts_as_visible() -> None:
    x = torch.full((1, 6), -math.inf)
    assert ops.candidate_blocks(x, torch.tensor([6]), 2, 3).all()


def test_mask_keeps_only_the_kept_blocks_of_a_ragged_row() -> None:
    x = torch.arange(5.0).unsqueeze(0)
    masked = ops.candidate_mask(x, torch.tensor([[False, True, True]]), 2)
    assert masked.tolist() == [[-math.inf, -math.inf, 2.0, 3.0, 4.0]]


def test_pool_of_one_token_is_that_token() -> None:
    value = torch.randn(3, 1, 8, generator=seeded(0))
    gate = torch.randn(3, 1, 8, generator=seeded(1)) * 50
    torch.testing.assert_close(ops.compress_pool(value, gate), value[:, 0])


def test_hash_matches_exact_integer_arithmetic_at_the_released_sizes() -> None:
    multipliers = [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    primes = [[16000057, 16000079], [16000463, 97], [3, 5]]
    offsets = [[0, 16000057], [7, 9], [11, 13]]
    ids = [[99091, 99091, 99091, 99091], [5, 0, 2, 77], [0, 0, 0, 0]]
    wanted = []
    for row in ids:
        running, columns = row[0] * multipliers[0], []
        for order in (1, 2, 3):
            running ^= row[order] * multipliers[order]
            columns += [
                running % p + o for p, o in zip(primes[order - 1], offsets[order - 1], strict=True)
            ]
        wanted.append(columns)
    got = ops.engram_hash(*(torch.tensor(t) for t in (ids, multipliers, primes, offsets)))
    assert got.tolist() == wanted


def test_blocked_rows_pass_the_gate_unchanged() -> None:
    g = seeded(2)
    streams, key = torch.randn(2, 3, 8, generator=g), torch.randn(2, 3, 8, generator=g)
    value, weight = torch.randn(2, 8, generator=g), torch.ones(3, 8)
    out = ops.engram_gate(streams, key, value, weight, weight, 1e-6, torch.tensor([True, False]))
    assert torch.equal(out[0], streams[0])
    assert not torch.equal(out[1], streams[1])
    opened = ops.engram_gate(streams, streams, value, weight, weight, 1e-20, None)
    gate = 1 / (1 + math.exp(-math.sqrt(8 * 8**-0.5)))  # equal norms: g = sqrt(H)
    torch.testing.assert_close(opened, streams + gate * value.unsqueeze(1))


def test_routing_bias_ranks_but_does_not_weigh() -> None:
    x, weight = torch.ones(1, 1), torch.tensor([[1.0], [2.0], [3.0]])
    score = [math.sqrt(math.log1p(math.exp(z))) for z in (1.0, 2.0, 3.0)]
    idx, w = ops.moe_gate(x, weight, torch.tensor([100.0, 0.0, 0.0]), 2, 1.5)
    assert idx.tolist() == [[0, 2]]
    total = score[0] + score[2]
    torch.testing.assert_close(w, torch.tensor([[score[0], score[2]]]) / total * 1.5)


def test_equal_scores_route_to_the_lower_experts_and_rows_may_have_their_own_bias() -> None:
    x, weight = torch.zeros(2, 4), torch.zeros(5, 4)
    idx, w = ops.moe_gate(x, weight, torch.zeros(5), 3, 1.0)
    assert idx.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(w, torch.full((2, 3), 1 / 3))
    bias = torch.zeros(2, 5)
    bias[1, 4] = 1
    assert ops.moe_gate(x, weight, bias, 2, 1.0)[0].tolist() == [[0, 1], [4, 0]]


def test_moe_layer_takes_a_bias_a_row_and_adds_the_shared_expert_once() -> None:
    x, gate = torch.ones(2, 1), torch.zeros(2, 1)
    bias = torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # row 0 goes to expert 1, row 1 to expert 0
    ones, w2 = torch.ones(2, 1, 1), torch.tensor([[[10.0]], [[100.0]]])
    out = ops.moe_layer(
        x, gate, bias, 1, 1.0, ones, ones, w2, ones[0], ones[0], torch.ones(1, 1), 9.0
    )
    silu = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(out, torch.tensor([[101 * silu], [11 * silu]]))


def test_cache_row_is_rounded_after_its_rotation() -> None:
    x = torch.randn(2, 32, generator=seeded(4))
    cos, sin = torch.full((2, 4), 0.6), torch.full((2, 4), 0.8)
    row = ops.norm_rope_quant(x, torch.ones(32), 1e-6, cos, sin, "index_fp4")
    wanted = ops.fake_quant(ops.rope(ops.rms_norm(x, torch.ones(32), 1e-6), cos, sin), "index_fp4")
    torch.testing.assert_close(row, wanted)


def test_experts_compute_the_weighted_sum_of_their_outputs() -> None:
    g = seeded(3)
    x = torch.randn(2, 4, generator=g, dtype=torch.float64)
    w1, w3, w2 = (torch.randn(3, *shape, generator=g, dtype=torch.float64)
                  for shape in ((5, 4), (5, 4), (4, 5)))  # fmt: skip
    idx, w = torch.tensor([[2, 0], [1, 1]]), torch.tensor([[0.5, 2.0], [1.0, 3.0]]).double()
    out = ops.moe_experts(x, idx, w, w1, w3, w2, 10.0)
    for row in range(2):
        wanted = torch.zeros(4, dtype=torch.float64)
        for slot in range(2):
            e = int(idx[row, slot])
            gate = (w1[e] @ x[row]).clamp(max=10)
            wanted += w[row, slot] * (
                w2[e] @ (gate * gate.sigmoid() * (w3[e] @ x[row]).clamp(-10, 10))
            )
        torch.testing.assert_close(out[row], wanted)


def test_expert_outside_the_table_raises() -> None:
    x, w = torch.zeros(1, 4), torch.ones(1, 1)
    tables = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(2, 4, 3)
    with pytest.raises(IndexError):
        ops.moe_experts(x, torch.tensor([[2]]), w, *tables, 10.0)


def test_negative_expert_does_not_count_from_the_end() -> None:
    for n in (1, 3):
        x, idx, w = torch.zeros(n, 4), torch.full((n, 1), -1), torch.ones(n, 1)
        tables = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(2, 4, 3)
        with pytest.raises(IndexError):
            ops.moe_experts(x, idx, w, *tables, 10.0)


def test_prime_of_zero_is_an_error_and_not_a_crash() -> None:
    one = torch.ones(1, 1, dtype=torch.int64)
    for prime in (0, -1):
        with pytest.raises(ShapeError, match="every prime is at least 1"):
            ops.engram_hash(torch.ones(1, 2).long(), one.expand(1, 2)[0], one * prime, one)


@pytest.mark.parametrize("record", ["fp8", "raw"])
def test_slot_past_the_cache_raises_and_writes_nothing(record: str) -> None:
    cache = torch.zeros(2, 256, dtype=torch.uint8)
    with pytest.raises(IndexError):
        ops.kv_store(torch.ones(2, 32), cache, torch.tensor([0, 99]), record)
    assert not cache.any()
    with pytest.raises(IndexError):
        ops.kv_load(cache, torch.tensor([99]), record, 32, torch.float32)


def test_gradients_reach_the_inputs() -> None:
    x = torch.randn(2, 8, generator=seeded(0), dtype=torch.float64, requires_grad=True)
    weight = torch.ones(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: ops.rms_norm(x, w, 1e-6), (x, weight))


def test_misuse_is_one_clear_error() -> None:
    x, cache = torch.zeros(2, 8), torch.zeros(1, 160, dtype=torch.uint8)
    with pytest.raises(ShapeError, match=r"rms_norm: weight is \[8\], got \[7\]"):
        ops.rms_norm(x, torch.zeros(7), 1e-6)
    with pytest.raises(ShapeError, match=r"float32, bfloat16 or float64, got torch\.float16"):
        ops.rms_norm(x.half(), None, 1e-6)
    with pytest.raises(ShapeError, match=r"visible is int64, got torch\.int32"):
        ops.candidate_blocks(x, torch.zeros(2, dtype=torch.int32), 8, 1)
    with pytest.raises(ShapeError, match="cos turns 10 channels but x has 8"):
        ops.rope(x, torch.zeros(2, 5), torch.zeros(2, 5))
    with pytest.raises(ShapeError, match="5 records of 33 bytes do not fit"):
        ops.kv_load(cache, torch.tensor([0]), "fp8", 32, torch.float32, entries=5)
    with pytest.raises(ShapeError, match=r"dtype is float32, bfloat16 or float64"):
        ops.kv_load(cache, torch.tensor([0]), "fp8", 32, torch.float16)
    with pytest.raises(RecordError, match="multiple of 32 channels, got 8"):
        ops.fake_quant(x, "fp8")
    with pytest.raises(ShapeError, match=r"topk is 1..4, got 5"):
        ops.moe_gate(x, torch.zeros(4, 8), torch.zeros(4), 5, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", ["reference", "cpu", "native"])
def test_end_and_beginning_of_sub_layers_in_one_call_are_the_same_bits_as_in_two(
    backend: str, dtype: torch.dtype
) -> None:
    spec = default_registry.spec("mhc_post_pre_norm")
    if default_registry.impls(spec.name)[backend].unavailable() is not None:
        pytest.skip(f"{backend} is not here")
    for seed in range(20):
        y, streams, post, comb, *rest = spec.cases(seeded(seed), dtype)
        with use(backend=backend):
            got = ops.mhc_post_pre_norm(y, streams, post, comb, *rest)
            streams = ops.mhc_post(y, streams, post, comb)
            wanted = (streams, *ops.mhc_pre_norm(streams, *rest))
        assert all(map(torch.equal, got, wanted))
