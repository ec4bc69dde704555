"""One changed kernel in the interpreter: does the fuzz notice?  mutant.py OPERATOR OLD NEW

Prints "noticed" and what it was, or "unnoticed". A process of its own, since a wrong kernel may
write outside its buffers. The operator may name a back end: ``mla_decode_sparse/sm100``.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch

from deepinfer_kernels.registry import default_registry
from deepinfer_kernels.testing import check_impl

CASES = 40


def main(operator: str, old: str, new: str) -> str:
    op, _, backend = operator.partition("/")
    module = import_module(f"deepinfer_kernels.ops.{op}.{backend or 'triton'}")
    text = Path(module.__file__ or "").read_text(encoding="utf-8")
    if old not in text:
        raise SystemExit(f"{operator} has changed: {old!r} is not in it")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated.py"
        path.write_text(text.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("mutated", path)
        assert spec is not None
        assert spec.loader is not None
        mutated = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(mutated)
        for seed in range(CASES):
            try:
                # Forms for tensor units are of bfloat16 alone.
                dtype = torch.bfloat16 if backend or seed % 4 == 3 else torch.float32
                found = check_impl(default_registry.spec(op), getattr(mutated, op), seed, dtype)
            except Exception as error:
                return f"noticed: {error}"
            if not found.excess <= 1:
                return f"noticed: {found}"
    return "unnoticed"


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
