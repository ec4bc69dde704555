"""The compiled routines, where the package was installed with a C compiler.

`routines` is the extension module, None without it; `STATE` says which in a few words. Everything
works without it, slower: `json_text` and `prompt_builder` hold the Python form of each routine.
Setting the environment variable DEEPINFER_RECIPE_PURE=1 leaves it out.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from deepinfer_recipe.native.build import source_checksum

if TYPE_CHECKING:
    from types import ModuleType

_SWITCH = "DEEPINFER_RECIPE_PURE"


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get(_SWITCH, "0") not in ("", "0"):
        return None, f"pure Python: {_SWITCH} is set"
    try:
        from deepinfer_recipe.native import _routines
    except ImportError:
        return None, "pure Python: not compiled when installed"
    if source_checksum() != _routines.SOURCE_CHECKSUM:
        return None, "pure Python: compiled from other sources; install again"
    return _routines, "compiled"


routines, STATE = _load()
