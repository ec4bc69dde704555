"""Dispatch and combine against their definition in one process: the same bits with native forms."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_kernels import ops
from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.ep import Alone, GlooExchange, ep_combine, ep_dispatch
from deepinfer_kernels.errors import ExchangeError, ShapeError
from deepinfer_kernels.registry import default_registry

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
HIDDEN, INNER, SLOTS_PER_RANK, CHOICES, LIMIT = 24, 16, 3, 3, 10.0


def group_inputs(size: int, seed: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(x, slots, weights) of every rank; some have no token, experts are chosen unevenly."""
    g = torch.Generator().manual_seed(seed)
    inputs: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(size):
        tokens = int(torch.randint(0, 7, (1,), generator=g))
        x = torch.randn(tokens, HIDDEN, generator=g, dtype=torch.float64).to(dtype)
        popularity = torch.rand(size * SLOTS_PER_RANK, generator=g, dtype=torch.float64) ** 3
        slots = torch.empty((tokens, CHOICES), dtype=torch.int64)
        if tokens:
            slots = torch.multinomial(popularity.expand(tokens, -1), CHOICES, generator=g)
        weights = torch.rand(tokens, CHOICES, generator=g, dtype=torch.float64)
        inputs.append((x, slots, weights.to(acc_dtype(dtype))))
    return inputs


def experts(size: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """w1, w3, w2 of all slots."""
    g = torch.Generator().manual_seed(seed + 1)
    total = size * SLOTS_PER_RANK

    def matrix(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=g, dtype=torch.float64).mul_(0.3).to(dtype)

    return (
        matrix(total, INNER, HIDDEN),
        matrix(total, INNER, HIDDEN),
        matrix(total, HIDDEN, INNER),
    )


def one_process(
    x: Tensor, slots: Tensor, weights: Tensor, w: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """The definition: each choice's weighted output, added in the order of the choices."""
    wide = acc_dtype(x.dtype)
    out = torch.zeros(x.shape, dtype=wide)
    for choice in range(slots.shape[1]):
        one = slice(choice, choice + 1)
        out += ops.moe_experts(x, slots[:, one].contiguous(), weights[:, one], *w, LIMIT)
    return out.to(x.dtype)


def same(got: Tensor, wanted: Tensor) -> bool:
    """To the bit, where an expert's output does not follow how many tokens it has: torch's own
    products round by that."""
    if default_registry.impls("moe_experts")["native"].unavailable() is None:
        return torch.equal(got, wanted)
    least = torch.finfo(got.dtype).eps
    return torch.allclose(got, wanted, rtol=64 * least, atol=256 * least)


def exchanged(
    x: Tensor, slots: Tensor, weights: Tensor, w: tuple[Tensor, Tensor, Tensor], exchange
) -> Tensor:
    own = slice(exchange.rank * SLOTS_PER_RANK, (exchange.rank + 1) * SLOTS_PER_RANK)
    there = ep_dispatch(x, slots, weights, SLOTS_PER_RANK, exchange)
    assert there.counts.sum() == len(there.slots)
    assert (there.slots.diff() >= 0).all()
    y = ops.moe_experts(
        there.x, there.slots[:, None], there.weights[:, None], *(m[own] for m in w), LIMIT
    )
    return ep_combine(y, there, exchange, residual=x)


def member(rank: int, size: int, store: str, results) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    exchange = GlooExchange()
    wrong = 0
    for seed in range(6):
        for dtype in DTYPES:
            x, slots, weights = group_inputs(size, seed, dtype)[rank]
            w = experts(size, seed, dtype)
            wide = acc_dtype(dtype)
            with torch.inference_mode():
                got = exchanged(x, slots, weights, w, exchange)
            # The residual is added before the one rounding at the end.
            sums = [
                ops.moe_experts(x, slots[:, [c]], weights[:, [c]], *w, LIMIT)
                for c in range(CHOICES)
            ]
            wanted = sum(sums, torch.zeros(x.shape, dtype=wide)) + x.to(wide)
            wrong += int(not same(got, wanted.to(dtype)))
    dist.destroy_process_group()
    results.put((rank, wrong))


@pytest.mark.parametrize("size", [2, 4])
def test_processes_equal_one_to_the_bit(size: int, tmp_path: Path) -> None:
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    store = str(tmp_path / "store")
    group = [context.Process(target=member, args=(r, size, store, results)) for r in range(size)]
    for process in group:
        process.start()
    try:
        for process in group:
            process.join(timeout=120)
        assert [p.exitcode for p in group] == [0] * size
        reports = sorted(results.get() for _ in group)
    finally:
        for process in group:
            process.kill()
    assert reports == [(rank, 0) for rank in range(size)]


def left_alone(rank: int, store: str, results) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    exchange = GlooExchange()
    x, slots, weights = group_inputs(2, 3, torch.float32)[rank]
    ep_dispatch(x, slots, weights, SLOTS_PER_RANK, exchange)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ep_dispatch(x, slots, weights, SLOTS_PER_RANK, exchange)
    except ExchangeError as error:
        results.put(str(error))


def test_a_lost_rank_is_a_typed_error(tmp_path: Path) -> None:
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    store = str(tmp_path / "store")
    group = [context.Process(target=left_alone, args=(r, store, results)) for r in range(2)]
    for process in group:
        process.start()
    try:
        for process in group:
            process.join(timeout=60)
        assert [p.exitcode for p in group] == [0, -signal.SIGKILL]
        assert "rank 0 lost its group" in results.get()
    finally:
        for process in group:
            process.kill()


@given(seed=st.integers(0, 10_000), dtype=st.sampled_from(DTYPES))
def test_a_group_of_one_is_the_definition(seed: int, dtype: torch.dtype) -> None:
    x, slots, weights = group_inputs(1, seed, dtype)[0]
    w = experts(1, seed, dtype)
    there = ep_dispatch(x, slots, weights, SLOTS_PER_RANK, Alone())
    assert there.counts.tolist() == torch.bincount(slots.flatten(), minlength=3).tolist()
    y = ops.moe_experts(there.x, there.slots[:, None], there.weights[:, None], *w, LIMIT)
    assert same(ep_combine(y, there, Alone()), one_process(x, slots, weights, w))


def test_assignments_arrive_by_slot_and_then_in_order() -> None:
    x = torch.arange(4.0)[:, None].expand(4, 2).contiguous()
    slots = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])
    weights = torch.arange(8.0).view(4, 2)
    there = ep_dispatch(x, slots, weights, 3, Alone())
    assert there.slots.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert there.x[:, 0].tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert there.weights.tolist() == [1, 2, 6, 3, 5, 0, 4, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([[0, 3]])}, "slots are 0..2, got 0..3"),
        ({"slots": torch.tensor([[-1, 0]])}, "slots are 0..2, got -1..0"),
        ({"slots": torch.tensor([[0]])}, r"weights is \[1, 1\]"),
        ({"slots": torch.tensor([[0, 1]], dtype=torch.int32)}, "slots is int64"),
        ({"x": torch.zeros(2, 4)}, r"slots is \[2, \*\]"),
        ({"slots_per_rank": 0}, "slots_per_rank is at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(change, message: str) -> None:
    class Silent(Alone):
        def all_to_all(self, given, sends, receives):
            raise AssertionError("sent")

    fits = {
        "x": torch.zeros(1, 4),
        "slots": torch.tensor([[0, 1]]),
        "weights": torch.ones(1, 2),
        "slots_per_rank": 3,
    }
    with pytest.raises(ShapeError, match=message):
        ep_dispatch(**{**fits, **change}, exchange=Silent())


def test_combine_wants_an_output_for_each_assignment() -> None:
    there = ep_dispatch(torch.zeros(1, 4), torch.tensor([[0, 1]]), torch.ones(1, 2), 3, Alone())
    with pytest.raises(ShapeError, match=r"y is \[2, \*\], got \[1, 4\]"):
        ep_combine(torch.zeros(1, 4), there, Alone())
    with pytest.raises(ShapeError, match=r"residual is \[1, 4\]"):
        ep_combine(torch.zeros(2, 4), there, Alone(), residual=torch.zeros(1, 5))
    with pytest.raises(ExchangeError, match="sends itself all 2 rows"):
        Alone().all_to_all(torch.zeros(2), [1], [2])


def test_gloo_wants_a_process_group() -> None:
    with pytest.raises(ExchangeError, match="init_process_group"):
        GlooExchange()
