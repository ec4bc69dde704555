"""The model beside independent implementations: run by `nox -s oracle`, skipped where they are not
installed. Every comparison leaves its figures, printed as one table at the end."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

os.environ["HF_HUB_OFFLINE"] = "1"  # a missing file must fail here, not be fetched
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # NeMo compiles its activation; plain torch is the oracle

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "support"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

torch.set_num_threads(1)

# Imported here first, because the import itself warns and this project's warnings are errors.
with suppress(ImportError), warnings.catch_warnings():
    warnings.simplefilter("ignore")

    # isort: split
    import nemo_automodel.components.checkpoint.checkpointing
    import nemo_automodel.components.models.deepseek_v41.dspark
    import nemo_automodel.components.models.deepseek_v41.model  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of the other implementations are theirs to heed."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


class Record(Protocol):
    """Notes |ours - theirs| on the line `what` of the closing table; returns its (max, median)."""

    def __call__(
        self, what: str, ours: Tensor, theirs: Tensor, against: str = "NeMo"
    ) -> tuple[float, float]: ...


_FIGURES: dict[tuple[str, str], list[Tensor]] = {}


@pytest.fixture(scope="session")
def record() -> Record:
    def note(what: str, ours: Tensor, theirs: Tensor, against: str = "NeMo") -> tuple[float, float]:
        assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)}, {tuple(theirs.shape)}"
        gap = (ours.double() - theirs.double()).abs().flatten()
        assert gap.isfinite().all(), f"{what}: a value is no finite number"
        _FIGURES.setdefault((against, what), []).append(gap)
        return gap.max().item(), gap.median().item()

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _FIGURES:
        return
    terminalreporter.section("|ours - theirs|")
    terminalreporter.line(f"{'against':<13}{'what':<66}{'max':>9}{'median':>10}{'values':>9}")
    for (against, what), gaps in _FIGURES.items():
        gap = torch.cat(gaps)
        figures = f"{gap.max().item():>9.1e}{gap.median().item():>10.1e}{gap.numel():>9}"
        terminalreporter.line(f"{against:<13}{what:<66}{figures}")


@pytest.fixture(scope="session")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`quantised(seed, vision=False)`: a random tiny checkpoint in the released layout, in three
    shards."""
    from quantised_checkpoint import write_quantised
    from tiny_checkpoint import write_tiny

    @cache
    def directory(seed: int, vision: bool = False) -> Path:
        home = tmp_path_factory.mktemp(f"tiny{seed}")
        write_tiny(home / "float", seed=seed, vision=vision)
        write_quantised(home / "float", home / "q", shards=3)
        return home / "q"

    return directory
