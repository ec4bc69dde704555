"""Forms whose result for a row has the same bits whatever other rows are computed beside it.

A product of torch sums in an order that depends on how many rows it has, and where several answers
share a step that means: on the company. The C++ forms sum each row in one order; taken for every
number of rows, and with `linear` for the plain products between them, a model gives a token the
same logits in any batch, read in any chunks, drafted or not. The bits may differ between
instruction sets and versions of this package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels import ops
from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.errors import BackendError
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, only_native, torch_form
from deepinfer_kernels.native.library import unavailable
from deepinfer_kernels.registry import Kernel, default_registry

__all__ = ["linear", "resolve"]


def resolve(name: str, device: str | torch.device = "cpu") -> Kernel:
    """The batch-invariant form of an operator, or `linear`, called as what `registry.resolve`
    returns.

    It raises ShapeError for arguments that only torch's forms take. Raises UnknownOpError, and
    BackendError where there is no such form: on other devices than CPUs, without the C++ forms.
    """
    impls = {} if name == "linear" else default_registry.impls(name)
    _refuse(name, device)
    if name == "linear":
        return linear if default_registry.config.checked else _linear
    if "native" not in impls:
        raise BackendError(f"{name!r} has no batch-invariant form: it is not written in C++")
    form = only_native(impls["native"].fn)
    if not default_registry.config.checked:
        return form

    def checked(*args: Any, **named: Any) -> Any:
        with default_registry.use(backend="native", op=name):
            return getattr(ops, name)(*args, **named)

    return only_native(checked)


def _refuse(name: str, device: str | torch.device) -> None:
    kind = torch.device(device).type
    reason = f"runs on CPUs alone, not on {kind}" if kind != "cpu" else unavailable()
    if reason is not None:
        raise BackendError(f"{name!r} has no batch-invariant form here: the C++ form {reason}")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias``, summed as the other forms of this module.

    x: [n, K]; weight: [M, K] like x; bias: [M] or None. Sums are float32 (or float64), rounded
    once. Returns [n, M] like x. Raises ShapeError, and BackendError as `resolve`.
    """
    op = "linear"
    _refuse(op, x.device)
    floating(op, x=x)
    shape(op, "x", x, (None, None))
    shape(op, "weight", weight, (None, x.shape[1]))
    require(weight.dtype is x.dtype, op, f"weight is {x.dtype} like x, got {weight.dtype}")
    if bias is not None:
        floating(op, bias=bias)
        shape(op, "bias", bias, (weight.shape[0],))
    return _linear(x, weight, bias)


@only_native
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    torch_form(x.dtype, (x, weight), bias)
    x, weight = dense(x), dense(weight)
    bias = None if bias is None else as_dtype(bias, acc_dtype(x.dtype))
    (n, k), m = x.shape, weight.shape[0]
    out = x.new_empty((n, m))
    LIBRARY.di_linear(
        CODE[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        n,
        k,
        m,
        out.data_ptr(),
    )
    return out
