"""A router's process in a cluster: `python -m deepinfer_engine.cli.cluster.router SETTINGS`."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    from rich.console import Console

    from deepinfer_engine.cli.serve import run_serve
    from deepinfer_engine.settings import Settings

    settings = Settings.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return run_serve(settings, Console(stderr=True))


if __name__ == "__main__":
    sys.exit(main())
