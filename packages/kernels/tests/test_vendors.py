"""Adapters of others' kernel libraries: presence, version, and what they are called with.

The libraries need GPUs of a kind that is not here. Stand-ins with their signatures, computed by the
reference, show that an adapter hands over the right values in the right layout; that the libraries
do what their documents say is not shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_kernels import ep, vendors
from deepinfer_kernels.draw import seeded
from deepinfer_kernels.errors import BackendError
from deepinfer_kernels.formats.codes import e2m1_byte_values
from deepinfer_kernels.ops.grouped_mx_linear import vendor as grouped
from deepinfer_kernels.ops.grouped_mx_linear.spec import _args as grouped_args
from deepinfer_kernels.ops.mla_decode_sparse import vendor as decode
from deepinfer_kernels.ops.mla_decode_sparse.spec import _decode_args
from deepinfer_kernels.ops.mla_sparse import vendor as sparse
from deepinfer_kernels.registry import default_registry

Install = Callable[..., ModuleType]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a module and a distribution in place, as an installed library would be."""
    versions: dict[str, str] = {}
    stock = metadata.version

    def version(name: str) -> str:
        if name in vendors_names:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]
        return stock(name)

    vendors_names = {name for v in vendors.VENDORS.values() for name in v.distributions}
    monkeypatch.setattr(metadata, "version", version)
    vendors.load.cache_clear()

    def put(module: str, distribution: str | None, number: str, **members: Any) -> ModuleType:
        found = ModuleType(module)
        found.__spec__ = ModuleSpec(module, None)
        found.__dict__.update(members, __version__=number)
        monkeypatch.setitem(sys.modules, module, found)
        if distribution is not None:
            versions[distribution] = number
        vendors.load.cache_clear()
        return found

    yield put
    vendors.load.cache_clear()


# -- presence and version --------------------------------------------------------------------------


@pytest.mark.parametrize("module", list(vendors.VENDORS))
def test_missing_library_is_a_reason_with_the_way_to_get_it(module: str) -> None:
    if vendors.unavailable(module) is None:
        pytest.skip("it is installed")
    wanted = f"needs {module}: pip install {vendors.VENDORS[module].distributions[0]}"
    assert vendors.unavailable(module) == wanted
    with pytest.raises(BackendError, match=f"{module} cannot be called"):
        vendors.load(module)


@pytest.mark.parametrize(
    ("number", "taken"),
    [("1.0.0", True), ("1.7.2", True), ("1.0.0.dev0", False), ("1.0rc1", False), ("0.9", False),
     ("2.0.0", False), ("unknown", False), ("1.1.0.dev3", True)],
)  # fmt: skip
@pytest.mark.parametrize("distribution", ["deepinfer-flashmla", "flash-mla", None])
def test_versions_outside_the_known_range_are_refused(
    number: str, taken: bool, distribution: str | None, install: Install
) -> None:
    module = install("flash_mla", distribution, number)
    if taken:
        assert vendors.unavailable("flash_mla") is None
        assert vendors.load("flash_mla") is module
        return
    with pytest.raises(BackendError, match=f"from 1.0 to before 2.0, and {number} is installed"):
        vendors.load("flash_mla")
    assert (vendors.unavailable("flash_mla") is None) == (distribution is None)


def test_asking_imports_nothing_and_a_broken_library_is_told(
    monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    install("deep_gemm", "deepinfer-gemm", "2.8.2")

    def broken(name: str) -> ModuleType:
        raise ImportError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(vendors, "import_module", broken)
    assert vendors.unavailable("deep_gemm") is None
    with pytest.raises(BackendError, match=r"does not import: libcuda.so.1"):
        vendors.load("deep_gemm")


def test_registry_knows_the_adapters_and_says_why_they_are_not_taken() -> None:
    for op in ("mla_sparse", "mla_decode_sparse", "grouped_mx_linear"):
        impl = default_registry.impls(op)["vendor"]
        assert impl.requires.device_types == frozenset({"cuda"})
        choice = default_registry.choose(op, "cuda")  # of no compute capability: none is here
        assert "needs" in dict(choice.refused)["vendor"]


# -- FlashMLA --------------------------------------------------------------------------------------


def _flash_mla(install: Install, calls: list[dict[str, Any]]) -> None:
    """Both calls, by the reference, from the layouts that FlashMLA's documents name."""

    def with_kvcache(
        q: Tensor, k_cache: Tensor, block_table: None, cache_seqlens: None, head_dim_v: int,
        tile_scheduler_metadata: object, num_splits: None = None,
        softmax_scale: float | None = None, causal: bool = False, is_fp8_kvcache: bool = True,
        indices: Tensor | None = None, attn_sink: Tensor | None = None,
        extra_k_cache: Tensor | None = None, extra_indices_in_kvcache: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        calls.append(locals())
        assert q.shape[1:] == (1, 64, 512)
        assert (k_cache.shape[2:], k_cache.dtype) == ((1, 528), torch.uint8)
        assert indices is not None
        assert attn_sink is not None
        assert softmax_scale is not None
        assert (indices.dtype, indices.shape[2] % 64) == (torch.int32, 0)

        def section(cache: Tensor) -> Tensor:
            return cache.reshape(cache.shape[0], -1)

        extra = extra_k_cache
        out, lse = default_registry.spec("mla_decode_sparse").reference(
            q[:, 0], section(k_cache), indices[:, 0].long(), "fp8",
            None if extra is None else section(extra),
            None if extra_indices_in_kvcache is None else extra_indices_in_kvcache[:, 0].long(),
            "fp8" if extra is None or extra.shape[3] == 528 else "fp4", attn_sink, softmax_scale,
            k_cache.shape[1], None if extra is None else extra.shape[1],
        )  # fmt: skip
        return out[:, None], lse[:, :, None]

    def sparse_fwd(
        q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512,
        attn_sink: Tensor | None = None, topk_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        calls.append(locals())
        assert attn_sink is not None
        assert indices.dtype is torch.int32
        out, lse = default_registry.spec("mla_sparse").reference(
            q, kv[:, 0], indices[:, 0].long(), attn_sink, sm_scale
        )
        return out, lse, lse

    install(
        "flash_mla", "deepinfer-flashmla", "1.0.0", get_mla_metadata=lambda: (object(), None),
        flash_mla_with_kvcache=with_kvcache, flash_mla_sparse_fwd=sparse_fwd,
    )  # fmt: skip


def _lcm_pages(cache: Tensor, width: int) -> Tensor:
    """Pages as far apart as FlashMLA wants them."""
    apart = -(-cache.shape[1] // (32 * width)) * 32 * width
    whole = torch.zeros(cache.shape[0] * apart + 32, dtype=torch.uint8)
    whole = whole[-whole.data_ptr() % 32 :][: cache.shape[0] * apart].view(-1, apart)
    whole[:, : cache.shape[1]] = cache
    return whole[:, : cache.shape[1]]


@pytest.mark.parametrize("extra", ["fp8", "fp4", None])
def test_decode_hands_records_and_slots_to_flash_mla(extra: str | None, install: Install) -> None:
    calls: list[dict[str, Any]] = []
    _flash_mla(install, calls)
    args = list(
        _decode_args(seeded(1), (2, 64, 512, 40, 20), ("fp8", extra), torch.bfloat16, aligned=True)
    )
    args[1] = _lcm_pages(args[1], 528)
    if extra is not None:
        args[4] = _lcm_pages(args[4], 528 if extra == "fp8" else 288)
    wanted = default_registry.spec("mla_decode_sparse").reference(*args)
    got = decode.mla_decode_sparse(*args)
    assert len(calls) == 1
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_prefill_hands_rows_to_flash_mla(install: Install) -> None:
    calls: list[dict[str, Any]] = []
    _flash_mla(install, calls)
    g = seeded(2)
    q = torch.randn(3, 64, 512, generator=g).bfloat16()
    kv = torch.randn(9, 512, generator=g).bfloat16()
    idx = torch.tensor([[0, 8, -1], [-1, -1, -1], [4, 4, 2]])
    args = (q, kv, idx, torch.randn(64, generator=g), 512**-0.5)
    wanted = default_registry.spec("mla_sparse").reference(*args)
    got = sparse.mla_sparse(*args)
    assert len(calls) == 1
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_what_flash_mla_does_not_take_runs_elsewhere_and_is_said_once(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[dict[str, Any]] = []
    _flash_mla(install, calls)
    args = _decode_args(seeded(1), (2, 6, 64, 8, 8), ("fp8", None), torch.float32, aligned=True)
    for _ in range(2):
        out, _ = decode.mla_decode_sparse(*args)
    assert torch.equal(out, default_registry.spec("mla_decode_sparse").reference(*args)[0])
    assert not calls
    assert sum("vendor's form takes bfloat16" in r.getMessage() for r in caplog.records) <= 1


# -- DeepGEMM --------------------------------------------------------------------------------------


def test_grouped_product_reaches_deep_gemm_in_whole_tiles(install: Install) -> None:
    tile, seen = 128, []

    def contiguous(
        a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, grouped_layout: Tensor,
        recipe_a: tuple[int, int], recipe_b: tuple[int, int],
    ) -> None:  # fmt: skip
        seen.append(grouped_layout)
        assert (a[0].dtype, b[0].dtype) == (torch.float8_e4m3fn, torch.int8)
        assert (a[1].dtype, b[1].dtype) == (torch.float32, torch.float32)
        assert recipe_a == recipe_b == (1, 32)
        assert grouped_layout.dtype is torch.int32
        assert a[0].shape[0] % tile == 0
        rows = a[0].float().unflatten(1, (-1, 32)) * a[1][..., None]
        weights = e2m1_byte_values(d.device)[b[0].view(torch.uint8).int()].flatten(2)
        weights = (weights.unflatten(2, (-1, 32)) * b[1][..., None]).flatten(2)
        for start in range(0, d.shape[0], tile):
            part = grouped_layout[start : start + tile]
            experts = part[part >= 0].unique()
            assert len(experts) <= 1, "a tile holds one expert"
            for e in experts.tolist():
                d[start : start + tile] = rows[start : start + tile].flatten(1) @ weights[e].T

    install(
        "deep_gemm", "deepinfer-gemm", "2.8.2", m_grouped_fp8_fp4_gemm_nt_contiguous=contiguous,
        get_mk_alignment_for_contiguous_layout=lambda: tile,
    )  # fmt: skip
    for seed, counts in enumerate(([3, 0, 140, 1], [0, 0, 0, 5], [128, 128, 1, 0])):
        args = grouped_args(seeded(seed), counts, 4, 24, 128, wide=False)
        wanted = default_registry.spec("grouped_mx_linear").reference(*args)
        torch.testing.assert_close(grouped.grouped_mx_linear(*args), wanted, rtol=2**-6, atol=1e-2)
    assert len(seen) == 3


# -- DeepEP ----------------------------------------------------------------------------------------


class _Buffer:
    """DeepEP's buffer in a group of two of which the other rank holds experts and has no token."""

    def __init__(self, group: Any, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int):
        self.half: int

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_experts: int
    ) -> tuple[Any, ...]:
        assert topk_idx.dtype is torch.int32
        assert topk_weights.dtype is torch.float32
        here = topk_idx < num_experts // 2
        kept = here.any(1)
        local = torch.where(here, topk_idx, -1)[kept]
        return x[kept], local, topk_weights[kept], (kept, x.shape[0]), None

    def combine(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> tuple[Any, ...]:
        kept, tokens = handle
        out = torch.zeros(tokens, x.shape[1], dtype=torch.float32)
        out[kept] += x.float()
        return (out if bias is None else out + bias.float()).bfloat16(), None, None


def test_tokens_go_through_deep_ep_sorted_by_slot_and_return_summed(install: Install) -> None:
    install("deep_ep", "deepinfer-ep", "2.5.0", EPBuffer=_Buffer, topk_idx_t=torch.int32)

    class Group:
        def size(self) -> int:
            return 2

    g = seeded(5)
    x = torch.randn(7, 16, generator=g).bfloat16()
    slots = torch.stack([torch.randperm(6, generator=g)[:3] for _ in range(7)])
    weights = torch.rand(7, 3, generator=g)
    exchange = ep.DeepEP(Group(), most_tokens=8, hidden=16, choices=3)
    got = exchange.dispatch(x, slots, weights, slots_per_rank=3)
    assert torch.equal(got.slots, got.slots.sort().values)
    assert torch.equal(got.counts, torch.bincount(slots[slots < 3], minlength=3))
    y = got.x.float() * got.weights[:, None] * (1 + got.slots[:, None])
    residual = torch.randn(7, 16, generator=g).bfloat16()
    out = exchange.combine(y, got, residual)
    here = torch.where(slots < 3, weights * (1 + slots), 0.0).sum(1, keepdim=True)
    torch.testing.assert_close(
        out.float(), x.float() * here + residual.float(), rtol=2**-6, atol=2e-2
    )


def test_deep_ep_that_is_missing_is_told_at_use() -> None:
    if vendors.unavailable("deep_ep") is None:
        pytest.skip("it is installed")
    with pytest.raises(BackendError, match="pip install deepinfer-ep"):
        ep.DeepEP(None, 1, 1, 1)
