"""Makes `tests/support` importable: under importlib mode a test folder is no package."""

from __future__ import annotations

import sys
from pathlib import Path

SUPPORT = str(Path(__file__).parents[1] / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)
