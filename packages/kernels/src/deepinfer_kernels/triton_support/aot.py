# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
"""Compiling every Triton form for named targets without a device, and what came out.

That a kernel compiles says little: too much tensor memory compiles to a single trap, too much
shared memory and spilled registers pass without a word. So each result is held against the limits
of its target and, where something is expected, for instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.errors import BackendError
from deepinfer_kernels.registry import default_registry
from deepinfer_kernels.triton_support import interp
from deepinfer_kernels.triton_support.launch import FP_FUSION, Launch, recording

__all__ = [
    "BACKENDS",
    "LIMITS",
    "POINTERS",
    "TARGETS",
    "Compiled",
    "collect",
    "compile_all",
    "compile_one",
]

TARGETS: Mapping[str, int] = {"sm80": 80, "sm90a": 90, "sm100a": 100, "sm120a": 120}
"""Compute capability by name."""
BACKENDS: Mapping[str, tuple[str, ...] | None] = {"triton": None, "sm100": ("sm100a",)}
"""Back ends that are compiled, and the targets of those that are not for all."""
_SHARED_KB = {80: 163, 90: 227, 100: 227, 120: 99}
LIMITS = {"registers": 255, "tmem": 512}
"""Shared memory has a limit of its own for each target."""

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_FAMILIES = {
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mxf8f6f4": r"\btcgen05\.mma[.\w:]*kind::mxf8f6f4",
    "tma": r"\bcp\.async\.bulk\.tensor",
    "vector128": r"\b(?:ld|st)\.global[.\w:]*\.v4|\b(?:ld|st)\.global[.\w:]*\.v2\.b64",
    "cp_async": r"\bcp\.async",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one target. ``faults`` is empty where it keeps every limit."""

    kernel: str
    variant: str
    target: str
    registers: int
    stack: int
    shared: int
    tmem: int
    families: tuple[str, ...]
    faults: tuple[str, ...]


def collect(
    names: Sequence[str], variants: int = 2, backend: str = "triton"
) -> Iterator[tuple[str, Launch]]:
    """(variant, launch) of every distinct kernel of these operators, the largest shapes first."""
    kept: dict[str, set[str]] = {}
    for name in names:
        if find_spec(f"deepinfer_kernels.ops.{name}.{backend}") is None:
            continue
        form = getattr(import_module(f"deepinfer_kernels.ops.{name}.{backend}"), name)
        shapes = default_registry.spec(name).shapes(torch.bfloat16)
        for args in reversed(list(shapes.values())):
            with recording() as launches, torch.no_grad():
                form(*args)
            for one in launches:
                label = _variant(one)
                seen = kept.setdefault(one.kernel.__name__, set())
                if label not in seen and len(seen) < variants:
                    seen.add(label)
                    yield label, one


def _variant(one: Launch) -> str:
    dtypes = sorted({str(a.dtype)[6:] for a in one.args if isinstance(a, Tensor)})
    constants = ",".join(f"{k}={v}" for k, v in sorted(one.constants.items()))
    return f"{'/'.join(dtypes)} {constants} warps={one.num_warps}"


def _source(one: Launch) -> Any:
    """What the compiler would be given at the launch: types, constants, known divisibility."""
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    values = iter(one.args)
    for i, name in enumerate(one.kernel.arg_names):
        value = one.constants[name] if name in one.constants else next(values)
        divisible = isinstance(value, Tensor) or (
            isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0
        )
        if name in one.constants or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[(i,)] = value
            continue
        if isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[name] = "fp32"
        if divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=one.kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_one(label: str, one: Launch, target: str) -> Compiled:
    """Compile for one target and read what became of it."""
    import triton
    from triton.backends.compiler import GPUTarget

    options: dict[str, Any] = {"num_warps": one.num_warps, "enable_fp_fusion": FP_FUSION}
    if one.num_stages is not None:
        options["num_stages"] = one.num_stages
    capability = TARGETS[target]
    name = one.kernel.__name__
    try:
        built = triton.compile(
            _source(one), target=GPUTarget("cuda", capability, 32), options=options
        )
    except Exception as raised:  # whatever a compiler may raise is this row's result
        error: Exception = raised
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        text = str(error).strip().splitlines() or [type(error).__name__]
        return Compiled(name, label, target, 0, 0, 0, 0, (), (f"does not compile: {text[-1]}",))
    text = built.asm["ptx"]
    used = _resources(built.asm["cubin"])
    shared = max(int(built.metadata.shared), used["SHARED"])
    tmem = int(getattr(built.metadata, "tmem_size", 0) or 0)
    families = tuple(f for f, pattern in _FAMILIES.items() if re.search(pattern, text))
    faults: list[str] = []
    if used["REG"] > LIMITS["registers"] or used["REG"] * 32 * one.num_warps > 65536:
        faults.append(f"{used['REG']} registers of {32 * one.num_warps} threads")
    if (used["STACK"] or used["LOCAL"]) and _touches_stack(built.asm["cubin"]):
        faults.append(f"spills: {used['STACK'] + used['LOCAL']} bytes of stack")
    if shared > _SHARED_KB[capability] * 1024:
        faults.append(f"{shared} bytes of shared memory")
    if tmem > LIMITS["tmem"]:
        faults.append(f"{tmem} columns of tensor memory")
    if used["REG"] < 8 or re.search(r"\{\s*trap;", text):
        faults.append("the body is a trap")
    return Compiled(
        name, label, target, used["REG"], used["STACK"], shared, tmem, families, tuple(faults)
    )


def _touches_stack(cubin: bytes) -> bool:
    """Whether local memory is written or read. A division reserves a frame for its rare path, which
    it does not use: that is no spill."""
    return re.search(r"\b(?:STL|LDL)\b", _asked(cubin, "nvdisasm", "-c")) is not None


def _asked(cubin: bytes, tool: str, *options: str) -> str:
    import triton

    path = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), *options, file.name]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout


def _resources(cubin: bytes) -> dict[str, int]:
    said = _asked(cubin, "cuobjdump", "-res-usage")
    found = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", said)}
    return {key: found.get(key, 0) for key in ("REG", "STACK", "SHARED", "LOCAL")}


def compile_all(names: Sequence[str], targets: Sequence[str], variants: int) -> Iterator[Compiled]:
    """Every kernel of the operators for every target."""
    if interp.active():
        raise BackendError("TRITON_INTERPRET is set: kernels were made for the interpreter")
    for backend, only in BACKENDS.items():
        for label, one in collect(names, variants, backend):
            if backend == "triton" or one.kernel.__name__.endswith(f"_{backend}_kernel"):
                for target in targets if only is None else [t for t in targets if t in only]:
                    yield compile_one(label, one, target)
