"""The tiny checkpoints, and the trainer's dense model beside them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_checkpoint import write_tiny

torch.set_num_threads(1)

TWIN = Path(__file__).parents[3] / "tools" / "train_demo" / "twin.py"


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny-vision"), vision=True)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def twin() -> ModuleType:
    """The dense model the trainer uses: the same architecture, written independently."""
    spec = importlib.util.spec_from_file_location("train_demo_twin", TWIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_demo_twin"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a window of a whole block."""
    return write_tiny(tmp_path_factory.mktemp("wide"), sliding_window=128)
