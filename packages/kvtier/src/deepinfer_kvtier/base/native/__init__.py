"""The compiled routines, where the package was installed with a C compiler.

`routines` is the extension module, None without it; `STATE` says which in a few words. Everything
works without it, slower. The environment variable DEEPINFER_KVTIER_PURE=1 leaves it out.
"""

from __future__ import annotations

import importlib
import os
import zlib
from pathlib import Path
from typing import Any

_SWITCH = "DEEPINFER_KVTIER_PURE"


def source_checksum() -> str:
    """CRC-32 over the C sources: tells a library that was left over from other sources."""
    value = 0
    for path in sorted((Path(__file__).parent / "src").iterdir()):
        if path.suffix in {".c", ".h"}:
            value = zlib.crc32(path.read_bytes(), value)
    return f"{value:08x}"


def _load() -> tuple[Any, str]:
    if os.environ.get(_SWITCH, "0") not in ("", "0"):
        return None, f"pure Python: {_SWITCH} is set"
    try:
        compiled = importlib.import_module(f"{__name__}._routines")
    except ImportError:
        return None, "pure Python: not compiled when installed"
    if source_checksum() != compiled.SOURCE_CHECKSUM:
        return None, "pure Python: compiled from other sources; install again"
    return compiled, "compiled"


routines, STATE = _load()
