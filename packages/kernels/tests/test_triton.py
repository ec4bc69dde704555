"""Triton forms in the interpreter, where the CPU stands in for the device.

They run with triton installed and TRITON_INTERPRET=1 (`nox -s kernels_triton`), else they are
skipped. What the interpreter cannot show: races, barriers, memory order, real tensor cores.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_kernels import registry
from deepinfer_kernels.errors import NumericsError
from deepinfer_kernels.forms import WRITTEN_IN_TRITON
from deepinfer_kernels.registry import default_registry
from deepinfer_kernels.testing import check_impl
from deepinfer_kernels.triton_support import interp

NAMES = default_registry.op_names()
FORMS = [name for name in NAMES if "triton" in default_registry.impls(name)]
ALL = [(name, b) for b in WRITTEN_IN_TRITON for name in NAMES if b in default_registry.impls(name)]
DTYPES = (torch.float32, torch.bfloat16)
SEEDS = 6

interpreted = pytest.mark.skipif(
    find_spec("triton") is None or not interp.active(),
    reason="needs triton and TRITON_INTERPRET=1: nox -s kernels_triton",
)


def test_at_least_nine_of_ten_operators_have_a_triton_form() -> None:
    assert len(FORMS) >= 0.9 * len(NAMES)


def test_without_a_device_no_triton_form_is_chosen_for_the_cpu() -> None:
    for name in NAMES:
        assert registry.choose(name, "cpu").impl.backend != "triton"


def test_on_a_gpu_the_triton_form_comes_before_the_reference() -> None:
    for name in FORMS:
        choice = registry.choose(name, "cuda")  # of no compute capability: none is here
        wanted = ("triton", "sm100") if find_spec("triton") else ("reference",)
        assert choice.impl.backend in wanted
        assert default_registry.impls(name)["triton"].maturity == "unmeasured"


# -- the interpreter itself ------------------------------------------------------------------------


def _convert(values: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """Through the repaired interpreter; bits in, bits out."""
    import triton.language as tl
    from triton.runtime import interpreter

    interp.repair()
    bits = values.contiguous().view(torch.uint8).numpy()
    kinds = {1: np.uint8, 2: np.uint16, 4: np.float32}
    data = bits.view(kinds[values.element_size()])
    handle = interpreter.TensorHandle(data, getattr(tl, source))
    done = interpreter.interpreter_builder.create_fp_to_fp(handle, getattr(tl, target), None)
    return torch.from_numpy(np.ascontiguousarray(done.data).view(np.uint8).copy())


NARROW = {
    "bfloat16": torch.bfloat16,
    "float8e4nv": torch.float8_e4m3fn,
    "float8e5": torch.float8_e5m2,
}


@interpreted
@pytest.mark.parametrize("name", list(NARROW))
def test_every_code_widens_and_narrows_as_torch_does(name: str) -> None:
    dtype = NARROW[name]
    size = dtype.itemsize
    codes = torch.arange(256**size, dtype=torch.int64).to(torch.int16 if size == 2 else torch.uint8)
    values = codes.view(dtype)
    wide = _convert(values, name, "float32").view(torch.float32)
    assert torch.equal(wide.nan_to_num(7e30), values.float().nan_to_num(7e30))
    number = ~wide.isnan()
    back = _convert(wide, "float32", name).view(dtype)
    finite = number & wide.isfinite()
    assert torch.equal(back.view(codes.dtype)[finite], codes[finite])
    assert back.float()[~number].isnan().all()


@interpreted
@pytest.mark.parametrize("name", list(NARROW))
def test_a_million_floats_round_to_nearest_and_saturate(name: str) -> None:
    dtype = NARROW[name]
    bits = torch.randint(-(2**31), 2**31, (10**6,), generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int32).view(torch.float32)
    limit = {"float8e4nv": 448.0, "float8e5": 57344.0}.get(name)
    clamped = x if limit is None else torch.where(x.isnan(), x, x.clamp(-limit, limit))
    got = _convert(x, "float32", name).view(dtype).float()
    wanted = clamped.to(dtype).float()
    assert torch.equal(got.nan_to_num(7e30), wanted.nan_to_num(7e30))


@interpreted
def test_self_test_notices_an_interpreter_that_is_not_repaired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime import interpreter

    interp.repair()
    interp.self_test()
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "binary_op", lambda self, a, b, op: a)
    with pytest.raises(NumericsError, match="adding bfloat16"):
        interp.self_test()


# -- the forms -------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize(("name", "backend"), ALL, ids=[f"{n}-{b}" for n, b in ALL])
def test_form_agrees_with_the_reference(name: str, backend: str) -> None:
    spec, fn = default_registry.spec(name), default_registry.impls(name)[backend].fn
    for seed in range(SEEDS if backend == "triton" else 3 * SEEDS):
        for dtype in DTYPES:
            found = check_impl(spec, fn, seed, dtype)
            assert found.excess <= 1, found


@interpreted
def test_float64_and_gradients_take_the_torch_form() -> None:
    spec, fn = default_registry.spec("rms_norm"), default_registry.impls("rms_norm")["triton"].fn
    x = torch.randn(3, 16, dtype=torch.float64)
    assert torch.equal(fn(x, None, 1e-6), spec.reference(x, None, 1e-6))
    weight = torch.nn.Parameter(torch.ones(16))
    assert fn(x.float(), weight, 1e-6).requires_grad


@interpreted
def test_public_functions_run_on_the_stand_in_device() -> None:
    from deepinfer_kernels import ops

    x = torch.randn(3, 64)
    with registry.use(backend="triton"):
        assert registry.choose("rms_norm").impl.backend == "triton"
        got = ops.rms_norm(x, None, 1e-6)
    torch.testing.assert_close(got, ops.rms_norm(x, None, 1e-6))


@interpreted
def test_index_work_of_a_decode_step_is_five_launches_whatever_the_sequences() -> None:
    """Three at the layer that keeps runs, two at one that chooses within them; nothing is copied
    or read back between."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from deepinfer_kernels.triton_support.launch import recording

    asked: list[str] = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            asked.append(str(func))
            return func(*args, **(kwargs or {}))

    spec = default_registry.spec("index_topk")
    form = default_registry.impls("index_topk")["triton"].fn
    shapes = spec.shapes(torch.bfloat16)
    counts: dict[str, int] = {}
    for label, args in shapes.items():
        with recording() as launches, Asked():
            form(*args)
        counts[label] = len(launches)
    assert set(asked) <= {"aten.new_empty.default", "aten.slice.Tensor"}
    assert counts["decode 1 of 4096"] == 3
    assert counts["decode 1 within 16 runs"] == counts["ragged decode"] == 2  # 1 and 32 sequences
    assert counts["decode 1 of 4096"] + counts["decode 1 within 16 runs"] <= 6


# -- mutations: a wrong kernel must be noticed -----------------------------------------------------

MUTATIONS = {
    "mask of a row": ("rms_norm", "inside = cols < N", "inside = cols < N - 1"),
    "epsilon": ("add_rms_norm", "/ N + eps", "/ N"),
    "partner of a channel": ("rope", "(place ^ 1)", "place"),
    "causal mask": ("gqa_attention", "key[None, :] <= position", "key[None, :] < position"),
    "first key": ("mla_sparse", "present = (listed >= 0)", "present = (listed > 0)"),
    "order of nibbles": ("kv_store", "low | (high << 4)", "high | (low << 4)"),
    "ties of a selection": ("topk_select", "(before < ties)", "(before <= ties)"),
    "barrier of a selection": ("topk_select", "    tl.debug_barrier()\n", ""),
    "barrier of a mix": ("mhc_pre", "    tl.debug_barrier()\n", ""),
    "row of a program": ("rms_norm", "tl.program_id(0)", "(tl.program_id(0) // 2)"),
    "last visible block": ("candidate_blocks", "(seen <= start", "(seen < start"),
    "zero of a weight": ("quant_linear", "(q - 8)", "(q - 7)"),
    "rounding of an activation": ("quant_linear", "nearest(v * inverse", "(v * inverse"),
    "first axis of the mix": ("mhc_post", "* H + j) * H + k", "* H + k) * H + j"),
    "sum over the slots": ("moe_experts", "total += down", "total = down"),
    "page of a key": ("gqa_attention", "key // entries, mask", "key // entries * 0, mask"),
    "first slot": ("qkv_rope_store", "kept = (own >= 0)", "kept = (own > 0)"),
    "part of the channels": ("mla_decode_sparse/sm100", "tl.program_id(2) *", "0 *"),
    "scale of a block": ("grouped_mx_linear/sm100", "start // 32 + blocks", "blocks"),
    "end of an expert": ("grouped_mx_linear", "row < tl.load(first + expert + 1)", "row < 10000"),
    "page of an entry": ("index_topk", "table + sequence * width", "table"),
    "last visible entry": ("index_topk", "inside & (entry < seen)", "inside & (entry < seen - 1)"),
    "tail of a row": ("index_topk", "range(0, count, BLOCK)", "range(0, count + 1 - BLOCK, BLOCK)"),
    "barrier of the runs": ("index_topk", "    tl.debug_barrier()\n", ""),
    "newest run": ("index_topk", "run == count - 1", "run == count"),
}


@interpreted
@pytest.mark.parametrize("what", list(MUTATIONS))
def test_mutated_kernel_is_caught_by_the_fuzz(what: str) -> None:
    """In a process of its own: a mutant may write anywhere, and a crash is noticed too."""
    command = [sys.executable, str(Path(__file__).with_name("mutant.py")), *MUTATIONS[what]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    noticed = done.returncode < 0 or done.stdout.startswith("noticed")
    assert noticed, f"{what}: {done.stdout} {done.stderr[-2000:]}"
    print(done.stdout)


# -- accesses without an order ---------------------------------------------------------------------


def _order() -> Any:
    from deepinfer_kernels.triton_support.order import Order

    return Order()


def test_what_was_stored_is_loaded_after_a_barrier_alone() -> None:
    order, at = _order(), np.arange(4, dtype=np.int64)
    order.stored(at, at)
    with pytest.raises(NumericsError, match="loads what it stored, without a barrier"):
        order.loaded(at[2:])
    order.barrier()
    order.loaded(at)


def test_one_place_is_stored_twice_after_a_barrier_alone() -> None:
    order, at = _order(), np.arange(4, dtype=np.int64)
    order.stored(at, at)
    with pytest.raises(NumericsError, match="twice, without a barrier"):
        order.stored(at[:1], at[:1])
    order.barrier()
    order.stored(at[:1], at[:1])


def test_programs_of_a_grid_keep_to_places_of_their_own() -> None:
    order, at = _order(), np.arange(4, dtype=np.int64)
    order.stored(at, at)
    order.program()
    with pytest.raises(NumericsError, match="two programs"):
        order.stored(at[3:], at[3:])
    with pytest.raises(NumericsError, match="another program"):
        order.loaded(at[:1])
    order.stored(at + 4, at)
    order.launch()
    order.loaded(at)


def test_lanes_that_store_to_one_place_store_one_value() -> None:
    order, at = _order(), np.zeros(2, dtype=np.int64)
    order.stored(at, np.array([7, 7]))
    order.launch()
    with pytest.raises(NumericsError, match="two lanes"):
        order.stored(at, np.array([7, 8]))
