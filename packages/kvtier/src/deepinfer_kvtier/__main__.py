"""`python -m deepinfer_kvtier` is the command `kvtier`."""

from __future__ import annotations

from deepinfer_kvtier.ops.cli import main

if __name__ == "__main__":
    main()
