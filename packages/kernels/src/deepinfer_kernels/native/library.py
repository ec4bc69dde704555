"""Loading the compiled library: the best level the machine has, checked against the sources."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from ctypes import c_char_p, c_double, c_int, c_int64, c_void_p
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from deepinfer_kernels.native.build import (
    LIBRARY_FOLDER,
    exports,
    levels,
    library_name,
    source_hash,
)

__all__ = ["level", "library_path", "load", "signatures", "unavailable"]

_TYPES = {"int": c_int, "int64_t": c_int64, "double": c_double}
_NO_MEMORY, _UNKNOWN_TYPE = 100, 2
_EXPORT = re.compile(r"DI_EXPORT\s+int\s+di_(\w+)\(([^)]*)\)")


def signatures() -> dict[str, tuple[type, ...]]:
    """Argument types of every exported function, read from its declaration in the sources."""
    found: dict[str, tuple[type, ...]] = {}
    for path in exports():
        for name, arguments in _EXPORT.findall(path.read_text(encoding="utf-8")):
            words = (argument.replace("const ", "").split() for argument in arguments.split(","))
            found[name] = tuple(
                c_void_p if "*" in "".join(word) else _TYPES[word[0]] for word in words
            )
    return found


def library_path(name: str) -> Path | None:
    """Where the library of one level lies: it is installed beside the package, not into it."""
    spec = PathFinder.find_spec(LIBRARY_FOLDER)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / library_name(name)
        if path.is_file():
            return path
    return None


def _machine_levels() -> list[str]:
    """Levels this machine can run, best first."""
    able = {"AVX512": {"v4", "v3"}, "AVX2": {"v3"}}.get(
        torch.backends.cpu.get_cpu_capability(), set()
    )
    return [level for level in levels() if level == "base" or level in able]


def _built() -> Iterator[tuple[str, Path]]:
    for name in _machine_levels():
        path = library_path(name)
        if path is not None:
            yield name, path


def _status(code: int) -> int:
    """What a C function returned; 1 and 3 are for its caller."""
    if code == _NO_MEMORY:
        raise MemoryError("no memory for the buffers of a native form")
    if code == _UNKNOWN_TYPE:
        raise TypeError("a native form was given a dtype it does not know")
    return code


@cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    """(library, its level) or (None, why not)."""
    level, path = next(_built(), ("", None))
    if path is None:
        return None, "is not built (no C++ compiler when the package was installed?)"
    try:
        library = ctypes.CDLL(str(path))
        library.di_source_hash.restype = c_char_p
        found = library.di_source_hash().decode()
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded: {error}"
    if found != source_hash():
        return None, "was built from other sources: reinstall the package"
    for name, types in signatures().items():
        function = getattr(library, f"di_{name}")
        function.argtypes, function.restype = types, _status
    return library, level


def unavailable() -> str | None:
    """Why the native back end cannot run here, or None."""
    library, reason = _open()
    return None if library is not None else reason


def level() -> str | None:
    """The instruction set in use: v4 is AVX-512, v3 AVX2, base neither; None if unavailable."""
    library, found = _open()
    return found if library is not None else None


def load() -> ctypes.CDLL:
    """The library. Raises OSError with the reason where `unavailable` gives one."""
    library, reason = _open()
    if library is None:
        raise OSError(f"the native back end {reason}")
    return library
