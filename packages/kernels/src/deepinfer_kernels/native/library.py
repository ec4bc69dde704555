"""Loading the compiled library: the best level the machine has, checked against the sources."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from deepinfer_kernels.native.build import levels, library_path, source_hash

__all__ = ["load", "unavailable"]

_P, _I, _L, _D = c_void_p, c_int, c_int64, c_double

SIGNATURES: dict[str, tuple[type, ...]] = {
    "rms_norm": (_I, _P, _P, _D, _L, _L, _P),
    "rope": (_I, _P, _P, _P, _I, _L, _L, _L, _L, _P),
    "swiglu": (_I, _P, _P, _D, _L, _P),
    "mhc_pre": (_I, _P, _P, _P, _P, _D, _D, _I, _L, _I, _L, _P, _P, _P),
    "mhc_pre_norm": (_I, _P, _P, _P, _P, _P, _P, _D, _D, _I, _L, _I, _L, _P, _P, _P, _P),
    "mhc_collapse": (_I, _P, _P, _L, _I, _L, _P),
    "mhc_post": (_I, _P, _P, _P, _P, _L, _I, _L, _P),
    "mla_sparse": (_I, _P, _P, _P, _P, _D, _L, _I, _L, _L, _L, _P, _P),
    "mla_decode_sparse": (
        *(_I, _P),
        *(_P, _P, _L, _L, _L, _L, _I),
        *(_P, _P, _L, _L, _L, _L, _I),
        *(_P, _D, _L, _I, _L, _P, _P),
    ),
    "index_logits": (_I, _P, _P, _P, _P, _L, _L, _I, _L, _L, _P),
    "topk_select": (_I, _P, _L, _L, _L, _P),
    "candidate_blocks": (_I, _P, _P, _L, _L, _L, _L, _P),
    "candidate_mask": (_I, _P, _P, _L, _L, _L, _P),
    "compress_pool": (_I, _P, _P, _L, _L, _L, _P),
    "kv_store": (_I, _P, _P, _P, _L, _L, _L, _L, _L, _I),
    "kv_load": (_I, _P, _P, _L, _L, _L, _L, _L, _I, _P),
    "fake_quant": (_I, _P, _L, _L, _I, _P),
    "norm_rope_quant": (_I, _P, _P, _D, _P, _P, _L, _L, _L, _I, _P),
    "mla_query_key": (
        *(_I, _P, _P, _P, _P, _P, _P, _P, _P, _D),
        *(_L, _L, _L, _L, _L, _L, _I, _P, _P, _P),
    ),
    "mla_output": (_I, _P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _L, _P),
    "engram_hash": (_P, _P, _P, _P, _L, _L, _L, _P),
    "engram_gate": (_I, _P, _P, _P, _P, _P, _D, _P, _L, _I, _L, _P),
    "moe_gate": (_I, _P, _P, _P, _L, _L, _D, _L, _L, _L, _P, _P),
    "moe_experts": (_I, _P, _P, _P, _P, _P, _P, _D, _L, _L, _L, _L, _L, _P),
    "moe_combine": (_I, _P, _P, _P, _L, _L, _L, _P),
    "moe_layer": (
        *(_I, _P, _P, _P, _L, _L, _D),
        *(_P, _P, _P, _P, _P, _P, _D, _L, _L, _L, _L, _L, _P),
    ),
}


def _machine_levels() -> list[str]:
    """Levels this machine can run, best first."""
    able = {"AVX512": {"v4", "v3"}, "AVX2": {"v3"}}.get(
        torch.backends.cpu.get_cpu_capability(), set()
    )
    return [level for level in levels() if level == "base" or level in able]


@cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    """(library, "") or (None, why not)."""
    built: list[Path] = [
        path for level in _machine_levels() if (path := library_path(level)).is_file()
    ]
    if not built:
        return None, "is not built (no C++ compiler when the package was installed?)"
    try:
        library = ctypes.CDLL(str(built[0]))
        library.di_source_hash.restype = c_char_p
        found = library.di_source_hash().decode()
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded: {error}"
    if found != source_hash():
        return None, "was built from other sources: reinstall the package"
    for name, types in SIGNATURES.items():
        function = getattr(library, f"di_{name}")
        function.argtypes, function.restype = types, c_int
    return library, ""


def unavailable() -> str | None:
    """Why the native back end cannot run here, or None."""
    library, reason = _open()
    return None if library is not None else reason


def load() -> ctypes.CDLL:
    """The library. Raises OSError with the reason where `unavailable` gives one."""
    library, reason = _open()
    if library is None:
        raise OSError(f"the native back end {reason}")
    return library
