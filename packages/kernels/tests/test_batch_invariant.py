"""Batch-invariant forms: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from deepinfer_kernels import batch_invariant, registry
from deepinfer_kernels.draw import matrix, normal, seeded
from deepinfer_kernels.errors import BackendError, ShapeError, UnknownOpError
from deepinfer_kernels.native.library import unavailable
from deepinfer_kernels.registry import default_registry
from deepinfer_kernels.settings import KernelConfig
from deepinfer_kernels.testing import DTYPES, check_impl

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"C++ forms: {unavailable()}")

WRITTEN_IN_CPP = [n for n in default_registry.op_names() if "native" in default_registry.impls(n)]

ROWS = {
    "rms_norm": (0,),
    "add_rms_norm": (0, 1),
    "silu_mul": (0,),
    "swiglu": (0, 1),
    "norm_rope_quant": (0, 3, 4),
    "mhc_pre_norm": (0, 1),
    "mhc_post_pre_norm": (0, 1, 2, 3, 4),
    "mla_query_key": (0, 6, 7),
    "mla_output": (0, 1, 2),
    "mla_sparse": (0, 2),
    "moe_gate": (0,),
    "moe_experts": (0, 1, 2),
    "moe_layer": (0,),
    "quant_linear": (0,),
}
"""Operator -> its arguments that have a row a token."""


@pytest.fixture
def checked() -> Iterator[None]:
    before = default_registry.config
    registry.configure(KernelConfig(checked=True))
    yield
    registry.configure(before)


def _tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


@settings(max_examples=30, deadline=None)
@example(seed=0, n=200, k=576, m=300)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 200),
    k=st.integers(1, 300),
    m=st.integers(1, 300),
)
def test_linear_is_the_product_and_a_row_is_the_same_in_any_company(
    seed: int, n: int, k: int, m: int
) -> None:
    g = seeded(seed)
    for dtype in DTYPES:
        x, weight, bias = normal(g, (n, k), dtype), matrix(g, (m, k), dtype), normal(g, (m,), dtype)
        whole = batch_invariant.linear(x, weight, bias)
        wanted = torch_linear(x.double(), weight.double(), bias.double())
        rough = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(whole.double(), wanted, atol=rough, rtol=rough)
        first, last = sorted(torch.randint(0, n + 1, (2,), generator=g).tolist())
        part = batch_invariant.linear(x[first:last], weight, bias)
        assert torch.equal(part, whole[first:last])
        for row in {0, n // 2, n - 1}:
            assert torch.equal(
                batch_invariant.linear(x[row : row + 1], weight, bias)[0], whole[row]
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_an_operator_is_the_same_in_any_company(name: str, dtype: torch.dtype) -> None:
    form = batch_invariant.resolve(name)
    tried = 0
    for args in default_registry.spec(name).shapes(dtype).values():
        rows = args[ROWS[name][0]].shape[0]
        if not 4 < rows <= 300:
            continue
        tried += 1
        whole = _tensors(form(*args))
        for first, last in ((0, 1), (rows - 1, rows), (1, min(rows, 30)), (3, rows)):
            own = [a[first:last] if i in ROWS[name] else a for i, a in enumerate(args)]
            for got, wanted in zip(_tensors(form(*own)), whole, strict=True):
                assert torch.equal(got, wanted[first:last]), (first, last)
    assert tried


@pytest.mark.parametrize("name", WRITTEN_IN_CPP)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_forms_agree_with_the_reference(name: str, seed: int) -> None:
    spec = default_registry.spec(name)
    for dtype in DTYPES:
        found = check_impl(spec, batch_invariant.resolve(name), seed, dtype)
        assert found.excess <= 1, found


def test_what_would_be_left_to_torch_is_refused() -> None:
    x = torch.randn(3, 64)
    with pytest.raises(ShapeError, match=r"want one dtype .* got torch.float32, torch.bfloat16"):
        batch_invariant.resolve("swiglu")(x, x.bfloat16(), 1.0)
    with pytest.raises(ShapeError, match="want no gradient"):
        batch_invariant.linear(x, torch.randn(2, 64, requires_grad=True))
    streams, mixes = torch.randn(2, 9, 16), torch.randn(99, 144)
    args = streams, mixes, torch.randn(99), torch.ones(3), 1e-6, 1e-6, 2
    with pytest.raises(ShapeError, match="at most 8 streams, got 9"):
        batch_invariant.resolve("mhc_pre")(*args)
    registry.resolve("mhc_pre")(*args)  # elsewhere torch takes it, also behind a refusal here


def test_where_there_is_no_such_form_the_operator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"'moe_layer' has no batch-invariant form here: .*cuda"):
        batch_invariant.resolve("moe_layer", "cuda:0")
    with pytest.raises(BackendError, match="'grouped_mx_linear' has no batch-invariant form"):
        batch_invariant.resolve("grouped_mx_linear")
    with pytest.raises(UnknownOpError):
        batch_invariant.resolve("nothing")
    monkeypatch.setattr(batch_invariant, "unavailable", lambda: "is not built")
    for name in ("linear", "rope"):
        with pytest.raises(BackendError, match=f"'{name}' .*: the C\\+\\+ form is not built"):
            batch_invariant.resolve(name)


def test_checked_mode_checks_these_forms_too(checked: None) -> None:
    x = torch.randn(2, 64)
    with pytest.raises(ShapeError, match=r"linear: weight is \[\*, 64\]"):
        batch_invariant.resolve("linear")(x, torch.randn(3, 32))
    with pytest.raises(ShapeError, match="rms_norm: weight"):
        batch_invariant.resolve("rms_norm")(x, torch.ones(63), 1e-6)
    torch.testing.assert_close(
        batch_invariant.resolve("rms_norm")(x, None, 1e-6),
        registry.resolve("rms_norm")(x, None, 1e-6),
    )
