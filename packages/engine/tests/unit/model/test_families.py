"""Families of other distributions: found by their entry point, used by name, never in our place."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dense_checkpoint import write_dense

from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.model.registry import families, family_of
from deepinfer_engine.model.runner import build_runner

MODULE = '''
from deepinfer_engine.model.dense.family import Dense

class Renamed(Dense):
    """Runs what dense models run, under a name of its own."""
    name = "renamed"
    architectures = ("RenamedForCausalLM", "LlamaForCausalLM")

    def read_config(self, raw):
        return super().read_config({**raw, "architectures": ["LlamaForCausalLM"]})

def broken():
    raise RuntimeError("no family here")
'''
ENTRIES = """[deepinfer.families]
broken = a_family_elsewhere:broken
renamed = a_family_elsewhere:Renamed
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution with two entry points, one of them broken."""
    (tmp_path / "a_family_elsewhere.py").write_text(MODULE)
    info = tmp_path / "a_family_elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: a-family-elsewhere\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    families.cache_clear()
    yield
    families.cache_clear()
    sys.modules.pop("a_family_elsewhere", None)


@pytest.mark.usefixtures("distribution")
def test_a_family_of_another_distribution_is_found_and_does_not_replace_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_dense(tmp_path / "model")
    assert family_of(model).name == "dense"
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["RenamedForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    assert family_of(model).name == "renamed"
    said = caplog.text
    assert "a_family_elsewhere:broken cannot be used: no family here" in said
    assert "LlamaForCausalLM has a family already" in said


def test_without_it_the_architecture_is_unknown_and_those_that_run_are_named(
    tmp_path: Path,
) -> None:
    model = write_dense(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["RenamedForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"RenamedForCausalLM.*LlamaForCausalLM"):
        build_runner(model, num_blocks=4, num_state_slots=2)
