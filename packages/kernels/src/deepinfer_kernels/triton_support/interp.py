# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
"""The Triton interpreter, repaired: bfloat16 and float8 are converted, added and multiplied right.

Unrepaired, a conversion to bfloat16 truncates, an addition of two bfloat16 gives NaN, and a dot
product of them multiplies their bit patterns: kernel tests would mean nothing. `repair` replaces
the conversions by torch's (nearest, ties to even, saturating in float8) and computes bfloat16 in
float32 with one rounding. Loads and stores are watched for a missing order (`order`). `self_test`
shows that the repair took; both know one version of triton.

The interpreter is chosen by ``TRITON_INTERPRET=1`` before a module with kernels is imported.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np
import torch

from deepinfer_kernels.errors import NumericsError
from deepinfer_kernels.triton_support.order import Order

__all__ = ["KNOWN_VERSIONS", "active", "repair", "self_test"]

KNOWN_VERSIONS = ("3.9",)
"""Versions of triton whose interpreter this was written for and tried with."""


def active() -> bool:
    """Whether kernels run in the interpreter: on the CPU, without a compiler or a device."""
    return os.environ.get("TRITON_INTERPRET", "0").strip().lower() in {"1", "true", "on", "yes"}


@cache
def repair() -> None:
    """Patch the interpreter of this process, once, and test what was patched."""
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith(KNOWN_VERSIONS):
        known = ", ".join(KNOWN_VERSIONS)
        raise NumericsError(
            f"the interpreter of triton {triton.__version__} was never tried with this package; "
            f"it knows {known}"
        )
    _patch(interpreter)
    _watch(interpreter)
    self_test()


def _watch(interpreter: Any) -> None:
    """Hold every load and store against `Order`."""
    builder, order = interpreter.InterpreterBuilder, Order()
    stock_dim, stock_index = builder.set_grid_dim, builder.set_grid_idx
    stock_load, stock_store = builder.create_masked_load, builder.create_masked_store

    def grid_dim(self: Any, *dims: int) -> None:
        order.launch()
        stock_dim(self, *dims)

    def grid_index(self: Any, *index: int) -> None:
        order.program()
        stock_index(self, *index)

    def touched(pointers: Any, mask: Any) -> tuple[Any, Any]:
        chosen = np.broadcast_to(np.asarray(mask.data, dtype=bool), pointers.data.shape)
        return pointers.data[chosen].astype(np.int64), chosen

    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        order.loaded(touched(pointers, mask)[0])
        return stock_load(self, pointers, mask, *rest, **named)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        addresses, chosen = touched(pointers, mask)
        values = np.broadcast_to(value.data, pointers.data.shape)[chosen]
        order.stored(addresses, np.ascontiguousarray(values).view(f"u{values.itemsize}"))
        return stock_store(self, pointers, value, mask, *rest, **named)

    builder.set_grid_dim, builder.set_grid_idx = grid_dim, grid_index
    builder.create_masked_load, builder.create_masked_store = load, store
    builder.create_barrier = lambda self: order.barrier()


def _patch(interpreter: Any) -> None:
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    stock_convert, stock_cast = interpreter._convert_float, builder.cast_impl
    stock_binary, stock_unary, stock_dot = builder.binary_op, builder.unary_op, builder.create_dot
    handle = interpreter.TensorHandle
    narrow = {
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    wide = {tl.float16: torch.float16, tl.float32: torch.float32, tl.float64: torch.float64}
    largest = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
    integers = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    nearest = {None, interpreter._ir.ROUNDING_MODE.RTNE}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        kinds = {**narrow, **wide}
        if source not in kinds or target not in kinds or rounding not in nearest:
            return stock_convert(data, source, target, rounding)
        bits = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        values = torch.from_numpy(bits.copy()).view(kinds[source])
        if target in largest:
            values = values.float()
            limit = largest[target]
            values = torch.where(values.isnan(), values, values.clamp(-limit, limit))
        raw = values.to(kinds[target]).view(torch.uint8).numpy()
        return raw.view(integers[kinds[target].itemsize]).reshape(np.shape(data))

    def floats(value: Any) -> Any:
        return convert(value.data, value.dtype.scalar, tl.float32, None).view(np.float32)

    def is_narrow(value: Any) -> bool:
        return value.dtype.scalar in narrow

    def rounded(data: Any, dtype: Any) -> Any:
        if data.dtype == np.bool_:
            return handle(data, tl.int1)
        return handle(convert(data.astype(np.float32), tl.float32, dtype, None), dtype)

    def cast(self: Any, source: Any, target: Any) -> Any:
        if is_narrow(source) or target.scalar in narrow:
            if is_narrow(source):
                source = handle(floats(source), tl.float32)
            if target.scalar in narrow:
                return rounded(source.data, target.scalar)
        return stock_cast(self, source, target)

    def fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        data = convert(source.data, source.dtype.scalar, target.scalar, rounding)
        return handle(data.view(interpreter._get_np_dtype(target)), target.scalar)

    def binary(self: Any, left: Any, right: Any, op: Any) -> Any:
        if is_narrow(left) and op not in {np.bitwise_and, np.bitwise_or, np.bitwise_xor}:
            with np.errstate(all="ignore"):
                return rounded(op(floats(left), floats(right)), left.dtype.scalar)
        return stock_binary(self, left, right, op)

    def unary(self: Any, value: Any, op: Any) -> Any:
        if is_narrow(value):
            return rounded(op(floats(value)), value.dtype.scalar)
        return stock_unary(self, value, op)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a = handle(floats(a), tl.float32) if is_narrow(a) else a
        b = handle(floats(b), tl.float32) if is_narrow(b) else b
        return stock_dot(self, a, b, *rest)

    interpreter._convert_float = convert
    builder.cast_impl, builder.create_fp_to_fp = cast, fp_to_fp
    builder.binary_op, builder.unary_op, builder.create_dot = binary, unary, dot


def self_test() -> None:
    """Raise NumericsError unless the interpreter of this process converts and computes right."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 100
    bits = values.to(torch.bfloat16).view(torch.uint16).numpy()
    half = handle(values.numpy(), tl.float32)
    stored = handle(bits, tl.bfloat16)

    def same(found: Any, wanted: torch.Tensor, what: str) -> None:
        if not np.array_equal(np.asarray(found), wanted.numpy()):
            raise NumericsError(f"the Triton interpreter is wrong about {what}: its repair failed")

    cast = builder.create_fp_trunc(half, tl.bfloat16).data
    same(cast, torch.from_numpy(bits), "rounding to bfloat16")
    rounded = values.to(torch.bfloat16)
    total = builder.create_fadd(stored, stored).data
    same(total, (rounded + rounded).view(torch.uint16), "adding bfloat16")
    square = handle(bits[:256].reshape(16, 16), tl.bfloat16)
    zero = handle(np.zeros((16, 16), dtype=np.float32), tl.float32)
    product = builder.create_dot(square, square, zero, None, 0).data
    matrix = rounded[:256].view(16, 16).float()
    if not np.allclose(product, (matrix @ matrix).numpy(), rtol=1e-5, atol=1e-2):
        raise NumericsError("the Triton interpreter is wrong about bfloat16 products")
