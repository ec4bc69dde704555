"""Our own families keep what every family promises."""

from __future__ import annotations

from pathlib import Path

from dense_checkpoint import write_dense
from tiny_checkpoint import write_tiny

from deepinfer_engine.testing import FamilyContract


class TestDense(FamilyContract):
    def checkpoint(self, folder: Path) -> None:
        write_dense(folder, "qwen3")


class TestV41(FamilyContract):
    def checkpoint(self, folder: Path) -> None:
        write_tiny(folder)
