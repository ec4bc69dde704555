"""Where the benches of this folder keep what they printed: one JSON, an entry a bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def record(path: Path | None, name: str, figures: Any) -> None:
    """Put the figures of one bench into the file, beside those of the others."""
    if path is None:
        return
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    held[name] = figures
    path.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n", encoding="utf-8")
