"""Inside other people's programs: fake, meta, wrapped, strided and negated tensors, gradients,
transforms, other default devices, memory that runs out."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer_kernels import ops, registry
from deepinfer_kernels.draw import seeded
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.registry import default_registry, use

NAMES = default_registry.op_names()
FORMS = [
    (name, backend)
    for name in NAMES
    for backend, impl in default_registry.impls(name).items()
    if backend in {"native", "cpu"} and impl.unavailable() is None
]
WITHOUT_GRADIENT = {
    "candidate_blocks",
    "engram_hash",
    "fake_quant",
    "gqa_attention",
    "kv_load",
    "kv_store",
    "mla_decode_sparse",
    "norm_rope_quant",
    "mla_query_key",
    "qkv_rope_store",
    "topk_select",
}
"""Selections, byte caches, and roundings whose derivative is 0 or whose torch form has none."""


def _case(name: str, seed: int = 3) -> tuple[Any, ...]:
    """A drawn case that is not empty."""
    for at in range(seed, seed + 50):
        args = default_registry.spec(name).cases(seeded(at), torch.float32)
        if all(arg.numel() for arg in args if isinstance(arg, Tensor)):
            return tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
    raise AssertionError(f"{name} draws no case that is not empty")


def _tensors(args: tuple[Any, ...]) -> list[int]:
    return [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]


def _with(args: tuple[Any, ...], change: Callable[[Tensor], Tensor], at: int) -> tuple[Any, ...]:
    return tuple(change(arg) if i == at else arg for i, arg in enumerate(args))


def _first(result: Any) -> Tensor | None:
    return result[0] if isinstance(result, tuple) else result


# -- kinds of tensor -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_get_the_fake_form(name: str) -> None:
    args = _case(name)
    real = _first(getattr(ops, name)(*args))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
        fake = _first(getattr(ops, name)(*fakes))
    assert (real is None) == (fake is None)
    if real is not None and fake is not None:
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors_give_shapes_and_touch_nothing(name: str) -> None:
    args = _case(name)
    real = _first(getattr(ops, name)(*args))
    meta = _first(getattr(ops, name)(*(a.to("meta") if isinstance(a, Tensor) else a for a in args)))
    if real is not None and meta is not None:
        assert (meta.shape, meta.dtype, meta.device.type) == (real.shape, real.dtype, "meta")


@pytest.mark.parametrize("name", NAMES)
def test_one_tensor_on_another_device_is_refused_whichever_it_is(name: str) -> None:
    args = _case(name)
    places = _tensors(args)
    if len(places) < 2:
        pytest.skip("a single tensor is on its own device")
    for at in places:
        with pytest.raises(ShapeError, match="one device"):
            getattr(ops, name)(*_with(args, lambda t: t.to("meta"), at))


@pytest.mark.parametrize(("name", "backend"), FORMS)
def test_resolved_native_form_refuses_what_has_no_memory(name: str, backend: str) -> None:
    if backend != "native":
        pytest.skip("torch forms know these tensors")
    fn, args = default_registry.impls(name)[backend].fn, _case(name)
    for at in _tensors(args):
        with pytest.raises(ShapeError, match="plain dense CPU tensors"):
            fn(*_with(args, lambda t: t.to("meta"), at))


@pytest.mark.parametrize(("name", "backend"), FORMS)
def test_another_default_device_changes_nothing(name: str, backend: str) -> None:
    fn, args = default_registry.impls(name)[backend].fn, _case(name)
    wanted = _first(fn(*args))
    torch.set_default_device("meta")
    try:
        got = _first(fn(*args))
    finally:
        torch.set_default_device(None)
    if wanted is not None and got is not None:
        assert got.device.type == "cpu"
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(("name", "backend"), FORMS)
def test_no_form_leaves_a_conjugation_to_torch_s_dispatcher(name: str, backend: str) -> None:
    """Under torch.compile a form runs below it, where bits that wait to be resolved are not."""
    fn = default_registry.impls(name)[backend].fn
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
    for seed in range(6):
        wanted = _first(fn(*_case(name, seed)))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            got = _first(fn(*_case(name, seed)))
        if wanted is not None and got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_negated_view_is_read_as_what_it_stands_for(name: str) -> None:
    args = _case(name)
    for at in _tensors(args):
        if not args[at].is_floating_point() or at in default_registry.spec(name).writes:
            continue
        negated = _with(args, lambda t: torch._neg_view(-t), at)
        wanted, got = _first(getattr(ops, name)(*args)), _first(getattr(ops, name)(*negated))
        # Not to the bit: torch's own forms round by how memory lies, and the copy lies elsewhere.
        if wanted is not None and got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("name", "backend"), FORMS)
def test_every_argument_may_lie_in_memory_as_it_likes(name: str, backend: str) -> None:
    spec, fn = default_registry.spec(name), default_registry.impls(name)[backend].fn
    for seed in (3, 60):
        args = _case(name, seed)
        wanted = _first(spec.reference(*args))

        def scattered(t: Tensor) -> Tensor:
            return t.repeat_interleave(2, dim=-1)[..., ::2]

        def column_major(t: Tensor) -> Tensor:
            return t.transpose(0, -1).contiguous().transpose(0, -1)

        for at in _tensors(args):
            paged = args[at].dtype is torch.uint8 or at in spec.writes or name == "gqa_attention"
            if paged:
                continue  # pages have one layout, which the checks name
            for change in (scattered, column_major):
                got = _first(fn(*_with(args, change, at)))
                if wanted is not None and got is not None:
                    tolerance = spec.tolerance.of(torch.float32)
                    torch.testing.assert_close(
                        got, wanted, atol=tolerance[0] + 1e-12, rtol=tolerance[1] + 1e-12,
                        equal_nan=True,
                    )  # fmt: skip


class _Own(Tensor):
    """Somebody's subclass."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on first use
def test_subclass_goes_in_and_comes_out() -> None:
    x = torch.randn(4, 64).as_subclass(_Own)
    out = ops.rms_norm(x, torch.ones(64), 1e-6)
    assert type(out) is _Own
    plain = ops.rms_norm(x.as_subclass(Tensor), torch.ones(64), 1e-6)
    assert torch.equal(out.as_subclass(Tensor), plain)


def test_sparse_tensor_is_one_clear_error() -> None:
    with pytest.raises(ShapeError, match="every tensor is dense"):
        ops.rms_norm(torch.eye(4).to_sparse(), torch.ones(4), 1e-6)


# -- gradients and transforms --------------------------------------------------------------------


def _differentiable(name: str) -> list[int]:
    args = _case(name)
    floating = [i for i in _tensors(args) if args[i].is_floating_point()]
    return [i for i in floating if i not in default_registry.spec(name).writes]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_GRADIENT])
def test_gradient_of_any_one_argument_is_that_of_the_torch_form(name: str) -> None:
    args, spec = _case(name), default_registry.spec(name)

    def gradient(fn: Callable[..., Any], at: int) -> Tensor | None:
        asked = _with(args, lambda t: t.clone().requires_grad_(), at)
        results = fn(*asked)
        sums = [r.sum() for r in (results if isinstance(results, tuple) else (results,))
                if r.requires_grad and r.is_floating_point()]  # fmt: skip
        if not sums:
            return None
        return torch.autograd.grad(sum(sums), asked[at], allow_unused=True)[0]

    for at in _differentiable(name):
        wanted = gradient(spec.reference, at)
        for fn in (getattr(ops, name), getattr(torch.ops.deepinfer, name)):
            got = gradient(fn, at)
            assert (got is None) == (wanted is None), f"argument {at}"
            if got is not None and wanted is not None:
                torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_flow_through_compiled_calls() -> None:
    x = torch.randn(3, 64, generator=seeded(0))
    weight = torch.nn.Parameter(torch.ones(64))
    compiled = torch.compile(
        lambda a, b: ops.rms_norm(a, b, 1e-6) * 2, fullgraph=True, backend="aot_eager"
    )
    compiled(x, weight).sum().backward()
    own = torch.nn.Parameter(torch.ones(64))
    (default_registry.spec("rms_norm").reference(x, own, 1e-6) * 2).sum().backward()
    assert weight.grad is not None
    assert own.grad is not None
    torch.testing.assert_close(weight.grad, own.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on first use
def test_functional_transforms_look_into_the_torch_form() -> None:
    x, weight = torch.randn(3, 64, generator=seeded(0)), torch.rand(64)

    def norm(row: Tensor) -> Tensor:
        return ops.rms_norm(row, weight, 1e-6)

    torch.testing.assert_close(torch.vmap(norm)(x), norm(x))
    grad = torch.func.grad(lambda r: norm(r).square().sum())(x)
    assert grad.shape == x.shape
    assert torch.func.jvp(norm, (x,), (x,))[1].shape == x.shape


def test_no_gradient_asked_means_the_fast_form() -> None:
    if registry.choose("rms_norm").impl.backend != "native":
        pytest.skip("the native forms are not built here")
    weight = torch.nn.Parameter(torch.ones(64))
    with torch.no_grad():
        assert not ops.rms_norm(torch.randn(2, 64), weight, 1e-6).requires_grad
    with torch.inference_mode():
        assert ops.rms_norm(torch.randn(2, 64), weight, 1e-6).is_inference()


# -- many rows, no slots, NaN --------------------------------------------------------------------


def _moe(n: int, slots: int, view: str, dtype: torch.dtype) -> tuple[Any, ...]:
    g = seeded(1)
    experts, inner, width = 4, 48, 64
    both = torch.randn(experts, 2 * inner, width, generator=g).to(dtype) / 6
    w2 = torch.randn(experts, width, inner, generator=g).to(dtype) / 4
    if view == "halves":
        w1, w3 = both[:, :inner], both[:, inner:]
    elif view == "interleaved":
        w1, w3 = both[:, ::2], both[:, 1::2]
    elif view == "transposed":
        turned = both.transpose(1, 2).contiguous().transpose(1, 2)
        w1, w3 = turned[:, :inner], turned[:, inner:]
        w2 = w2.transpose(1, 2).contiguous().transpose(1, 2)
    elif view == "experts last":
        last = both.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        w1, w3 = last[:, :inner], last[:, inner:]
    else:
        w1, w3 = both[:1, :inner].expand(4, -1, -1), both[:1, inner:].expand(4, -1, -1)
    idx = torch.randint(0, experts - 1, (n, slots), generator=g)  # nobody asks for the last
    x, w = torch.randn(n, width, generator=g).to(dtype), torch.rand(n, slots, generator=g)
    return x, idx, w, w1, w3, w2, 7.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "view", ["halves", "interleaved", "transposed", "experts last", "one expert expanded"]
)
@pytest.mark.parametrize(("n", "slots"), [(8, 2), (1400, 2), (128, 0), (8, 0), (0, 2)])
def test_experts_take_weights_of_any_strides_and_any_number_of_rows(
    n: int, slots: int, view: str, dtype: torch.dtype
) -> None:
    args = _moe(n, slots, view, dtype)
    with use(backend="reference"):
        wanted = ops.moe_experts(*args)
    tolerance = default_registry.spec("moe_experts").tolerance.of(dtype)
    for backend in ("native", "cpu"):
        if default_registry.impls("moe_experts")[backend].unavailable() is None:
            with use(backend=backend):
                got = ops.moe_experts(*args)
            torch.testing.assert_close(got, wanted, atol=tolerance[0], rtol=tolerance[1])


@pytest.mark.parametrize("wrong", [-1, 4])
@pytest.mark.parametrize("n", [8, 1400])
def test_expert_outside_the_table_is_an_error_whatever_the_rows(n: int, wrong: int) -> None:
    x, idx, *rest = _moe(n, 2, "halves", torch.bfloat16)
    idx[n // 2, 1] = wrong
    with pytest.raises(IndexError):
        ops.moe_experts(x, idx, *rest)


NAN, INF = math.nan, math.inf
ROWS = {
    "nan first": [NAN, 1.0, 2.0, 3.0],
    "nan second": [1.0, NAN, 2.0, 3.0],
    "nan block": [NAN, NAN, 2.0, 3.0],
    "nan last": [1.0, 2.0, 3.0, NAN],
    "inf": [INF, 0.0, 2.0, 3.0],
    "minus inf": [-INF, -INF, -INF, -INF],
    "all nan": [NAN, NAN, NAN, NAN],
}


@pytest.mark.parametrize("row", list(ROWS.values()), ids=list(ROWS))
def test_selections_of_rows_with_nan_are_the_same_in_every_form(row: list[float]) -> None:
    x = torch.tensor([[*row, 0.0, 0.0, -1.0, -1.0, 5.0, 5.0]])
    gate = torch.randn(5, 10, generator=seeded(0))
    calls: dict[str, tuple[Any, ...]] = {
        "candidate_blocks": (x, torch.tensor([10]), 2, 2),
        "topk_select": (x, 4),
        "moe_gate": (x, gate, torch.zeros(5), 3, 1.0),
    }
    for name, args in calls.items():
        wanted = _first(default_registry.spec(name).reference(*args))
        for backend, impl in default_registry.impls(name).items():
            if backend in {"native", "cpu"} and impl.unavailable() is None:
                got = _first(impl.fn(*args))
                assert got is not None
                assert wanted is not None
                assert torch.equal(got, wanted), (name, backend, got.tolist(), wanted.tolist())


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_memory_that_runs_out_is_a_memory_error_and_not_the_end_of_the_process() -> None:
    code = (
        "import resource, torch\n"
        "from deepinfer_kernels import formats, ops, registry\n"
        "if registry.choose('mla_decode_sparse').impl.backend != 'native': raise SystemExit(0)\n"
        "q = torch.randn(1, 6, 64)\n"
        "page = torch.zeros(1, formats.section_bytes('fp8', 64, 128), dtype=torch.uint8)\n"
        "pages = page.expand(5_000_000, -1)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28),) * 2)\n"
        "slots = torch.full((1, 4), 600_000_000)\n"
        "try:\n"
        "    ops.mla_decode_sparse(q, pages, slots, 'fp8', None, None, 'fp8',\n"
        "                          torch.zeros(6), .125, 128)\n"
        "except MemoryError as error:\n"
        "    print('memory', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
