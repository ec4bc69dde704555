"""What the released model costs, counted over the runtime's own tensors and cache layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from released_config import RELEASED
from typer.testing import CliRunner

from deepinfer_engine.cli.main import app, run
from deepinfer_engine.model.v41.config import ModelConfig
from deepinfer_engine.model.v41.costs import cache_cost, context_cost, count_parameters
from deepinfer_engine.model.v41.expected import expected_tensors

CONFIG = ModelConfig.model_validate(RELEASED)


def test_parameters_are_the_published_ones() -> None:
    counted = count_parameters(CONFIG)
    assert counted.expert == 35_389_440
    assert counted.attention == 126_615_552
    assert round(counted.backbone / 1e9, 2) == 551.88
    assert round(counted.engram_tables / 1e9, 2) == 196.61
    assert round(counted.active_decode / 1e9, 2) == 16.13
    assert round(counted.active_prefill_compact / 1e9, 2) == 7.90
    assert counted.vision == 411_842_560 + 73_410_560 + 3 * 5120


def test_the_whole_checkpoint_has_the_published_size_to_the_byte() -> None:
    assert count_parameters(CONFIG).stored_bytes == 510_286_023_000
    specs = expected_tensors(CONFIG).values()
    assert sum(1 if spec.scale_shape is None else 2 for spec in specs) == 96_085


def test_cache_is_890_bytes_a_token() -> None:
    cost = cache_cost(CONFIG)
    assert cost.block == 113_920
    assert cost.per_token == 890
    assert cost.state == 43 * 70_752 + 86_016 + 32  # windows, open groups, padding to 64 bytes
    assert context_cost(CONFIG, 1_048_576).resident_bytes == 1_048_576 * 890


@pytest.mark.parametrize(
    ("tokens", "decode", "off", "compact", "read_mb"),
    [
        (4_096, 40.6, 38.0, 19.2, 10.1),
        (32_768, 41.1, 38.5, 19.4, 18.3),
        (131_072, 42.1, 39.5, 20.0, 35.0),
        (1_048_576, 51.5, 48.9, 25.6, 191.0),
    ],
)
def test_work_and_traffic_at_a_context_length(
    tokens: int, decode: float, off: float, compact: float, read_mb: float
) -> None:
    cost = context_cost(CONFIG, tokens)
    assert round(cost.decode_flops / 1e9, 1) == decode
    assert round(cost.prefill_flops / 1e9, 1) == off
    assert round(cost.prefill_compact_flops / 1e9, 1) == compact
    assert round(cost.decode_read_bytes / 1e6, 1) == read_mb


def test_bounded_replay_halves_the_work_of_a_prompt() -> None:
    def share(tokens: int) -> float:
        cost = context_cost(CONFIG, tokens)
        return cost.prefill_compact_flops / cost.prefill_flops

    assert max(share(n) for n in (4_096, 16_384, 65_536, 131_072)) <= 0.51
    assert share(1_048_576) <= 0.53


def test_inspect_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    for path in (tmp_path, tmp_path / "config.json"):
        shown = CliRunner().invoke(app, ["model", "inspect", str(path)], env={"COLUMNS": "120"})
        for words in (r"551\.88 B", r"113,920 B", r"1,048,576\s+51\.54", "none in this directory"):
            assert re.search(words, shown.stdout), shown.stdout


def test_inspect_as_json_checks_the_weights_that_are_there(
    tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["model", "inspect", str(tiny_dir), "--json", "--context", "200"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["weight_files_checked"] == 1
    assert [cost["tokens"] for cost in report["contexts"]] == [200]


def test_inspect_names_what_is_wrong(
    tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["model", "inspect", str(tmp_path)]) == 3
    assert "config.json: missing" in capsys.readouterr().err
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 100)
    assert run(["model", "inspect", str(tmp_path)]) == 3
    assert "model.safetensors: not a readable safetensors file" in capsys.readouterr().err
