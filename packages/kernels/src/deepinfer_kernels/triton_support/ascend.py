# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
"""Lowering the Triton forms for Ascend, as far as it goes without its toolkit: to HIVM.

triton-ascend is a Triton of its own (3.2) under the same name, so this runs in an environment of
its own: ``pip install triton-ascend ascendnpu-ir pybind11``, the last because triton-ascend imports
it without saying so. A kernel goes from Triton's IR to linalg by triton-ascend's own optimiser, and
from there to HIVM by the compiler that ascendnpu-ir brings; what follows is in CANN alone. That a
kernel lowers, with its buffers placed, says nothing about its results.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from deepinfer_kernels.errors import BackendError
from deepinfer_kernels.triton_support.aot import POINTERS, collect
from deepinfer_kernels.triton_support.launch import Launch

__all__ = ["ARCHITECTURE", "UNIFIED_BUFFER", "Lowered", "lower_all", "run"]

ARCHITECTURE = "Ascend950PR_9579"
UNIFIED_BUFFER = 256 * 1024
"""Bytes of the vector unit's memory."""
_FLAGS = (
    f"--target={ARCHITECTURE}",
    "--enable-hfusion-compile=true",
    "--enable-triton-kernel-compile=true",
    "--save-linked-ir",
    "--enable-print-memory-allocated-size",
)
_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Lowered:
    """One kernel of one operator. ``stage`` is the last one reached; hivm is all there is here."""

    op: str
    kernel: str
    variant: str
    stage: str
    ub_bytes: int
    fault: str


def _source(one: Launch) -> Any:
    from triton.compiler.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    values = iter(one.args)
    for name in one.kernel.arg_names:
        value = one.constants[name] if name in one.constants else next(values)
        if name in one.constants or (isinstance(value, int) and value == 1):
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[name] = "fp32"
    return ASTSource(one.kernel, signature, constants)


def _lower(op: str, label: str, one: Launch) -> Lowered:
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
    from triton.backends.compiler import GPUTarget

    stage = "source"
    try:
        target = GPUTarget("npu", ARCHITECTURE, 32)
        backend = AscendBackend(target)
        options = backend.parse_options({"compile_on_910_95": True, "multibuffer": False})
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        module = _source(one).make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
        facts = {"hash": "none", "target": target, **vars(options)}
        module = make_ttir(module, facts, options)
        stage = "ttir"
        text = ttir_to_linalg(module, facts, options, named_ops=True)
        stage = "linalg"
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.mlir"
            source.write_text(text, encoding="utf-8")
            compilers = Path(str(import_module("ascendnpuir").__file__)).parent / "bin"
            tool = str(compilers / "bishengir-compile-a5")
            done = subprocess.run(
                [tool, str(source), *_FLAGS, f"--save-temps={folder}", "-o", f"{folder}/kernel"],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
            said = done.stdout + done.stderr
            # It ends with an error in any case: the next tool of its chain belongs to CANN.
            if not any("hivm.opt" in path.name for path in Path(folder).iterdir()):
                errors = [line for line in said.splitlines() if "error:" in line] or [said[-300:]]
                fault = errors[-1].partition("error:")[2].strip() or errors[-1]
                return Lowered(op, one.kernel.__name__, label, stage, 0, fault)
        bits = [int(n) for n in re.findall(r"UB\s+size\s*=\s*(\d+)\s*bits", said)]
        return Lowered(op, one.kernel.__name__, label, "hivm", max(bits, default=0) // 8, "")
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace")
        found = [line for line in said.splitlines() if "error:" in line] or [said[-300:]]
        fault = found[-1].partition("error:")[2].strip() or found[-1]
        return Lowered(op, one.kernel.__name__, label, stage, 0, fault)
    except Exception as raised:  # whatever a compiler may raise is this row's result
        error_: BaseException = raised
        while error_.__cause__ is not None:
            error_ = error_.__cause__
        return Lowered(
            op,
            one.kernel.__name__,
            label,
            stage,
            0,
            f"{type(error_).__name__}: {str(error_)[-300:]}",
        )


def lower_all(names: Sequence[str], variants: int) -> Iterator[Lowered]:
    """Every kernel that each operator launches. Raises BackendError without the two packages."""
    missing = [p for p in ("triton.backends.ascend", "ascendnpuir") if not _importable(p)]
    if missing:
        raise BackendError(
            "lowering for Ascend needs an environment of its own with triton-ascend, ascendnpu-ir "
            f"and pybind11; here {' and '.join(missing)} is missing"
        )
    for name in names:
        for label, one in collect([name], variants):
            yield _lower(name, label, one)


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def run(names: Sequence[str], variants: int, out: str | None) -> int:
    """Print one line a kernel; 1 where fewer operators lower whole than do not."""
    rows: list[Lowered] = []
    print(f"{'operator':18} {'kernel':26} {'stage':6} {'UB bytes':>8}")
    for row in lower_all(names, variants):
        rows.append(row)
        fault = f"  {row.fault}" if row.fault else ""
        over = "  over the unified buffer" if row.ub_bytes > UNIFIED_BUFFER else ""
        print(
            f"{row.op:18} {row.kernel:26} {row.stage:6} {row.ub_bytes:8}{fault}{over}", flush=True
        )
    stuck = {row.op for row in rows if row.stage != "hivm" or row.ub_bytes > UNIFIED_BUFFER}
    whole = {row.op for row in rows} - stuck
    if out is not None:
        table = {
            "architecture": ARCHITECTURE,
            "triton": metadata.version("triton-ascend"),
            "ascendnpu-ir": metadata.version("ascendnpu-ir"),
            "rows": [asdict(row) for row in rows],
        }
        Path(out).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"{len(whole)} operators lower whole, {len(stuck)} do not")
    return 0 if len(whole) > len(stuck) else 1
