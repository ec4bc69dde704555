"""Drop-ins: never worse than the open algorithm, any element type, and the files of SGLang."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deepinfer_eplb import EplbError, LoadError, ShapeError, rebalance_experts
from deepinfer_eplb.peers.eplb import rebalance_from
from deepinfer_eplb.peers.sglang import read_recording, write_init_location
from deepinfer_eplb.placement import initial_placement, moved_share
from deepinfer_eplb.planning.published import totals_policy
from deepinfer_eplb.planning.totals import busiest

SIZES = ((64, 96, 8, 4, 16), (60, 66, 4, 2, 6), (24, 32, 1, 1, 16), (12, 16, 4, 2, 8))


def layers(experts: int, seed: int, count: int = 40) -> np.ndarray:
    rng = np.random.default_rng(seed)
    loads = np.floor(rng.gamma(np.repeat(rng.uniform(0.1, 5.0, (count, 1)), experts, axis=1)) * 999)
    loads[: count // 8] = rng.integers(0, 4, (count // 8, experts))  # ties and zeros
    return loads


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_no_layer_is_worse_than_by_the_open_algorithm(size) -> None:
    experts, slots, groups, nodes, ranks = size
    loads = layers(experts, sum(size))
    ours = rebalance_experts(loads, slots, groups, nodes, ranks)[0]
    theirs = totals_policy(loads, ranks, slots, groups, nodes)
    assert (busiest(loads, ours, ranks) <= busiest(loads, theirs, ranks)).all()
    later = np.floor(loads * np.random.default_rng(1).gamma(10, 0.1, loads.shape))
    moved = rebalance_from(later, slots, groups, nodes, ranks, ours)
    theirs = totals_policy(later, ranks, slots, groups, nodes)
    assert (busiest(later, moved, ranks) <= busiest(later, theirs, ranks)).all()
    assert moved_share(ours, moved, ranks) < moved_share(ours, theirs, ranks)
    per_node = slots // nodes
    for row in moved if nodes > 1 else ():
        spread = [
            np.flatnonzero(row // (experts // groups) == g) // per_node for g in range(groups)
        ]
        assert all(np.unique(nodes_of).size == 1 for nodes_of in spread)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "int64", "uint8", "float64"])
def test_tensors_of_any_number_type_are_loads(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.from_numpy(layers(12, 3, 6) % 200).to(getattr(torch, dtype))
    out = rebalance_experts(weight, 16, 1, 1, 8)
    same = rebalance_experts(weight.double(), 16, 1, 1, 8)
    assert all(torch.equal(a, b) for a, b in zip(out, same, strict=True))


def test_the_policy_returns_one_tensor_and_takes_placements_of_other_sizes() -> None:
    torch = pytest.importorskip("torch")
    from deepinfer_eplb.peers import vllm

    loads = torch.from_numpy(layers(24, 4, 5))
    old = vllm.rebalance(loads, 32, 1, 1, 8)
    assert old.dtype == torch.int64
    assert old.shape == (5, 32)
    assert vllm.rebalance(loads, 24, 1, 1, 6, old).shape == (5, 24)  # ranks 6 and 7 leave
    grown = torch.cat([old, torch.full((5, 8), -1)], dim=1)
    wide = vllm.rebalance(loads, 40, 1, 1, 10, grown)
    assert wide.shape == (5, 40)
    assert moved_share(old.numpy(), vllm.rebalance(loads, 32, 1, 1, 8, old).numpy(), 8) < 0.2
    for useless in (torch.full((5, 32), -1), torch.zeros(5, 32, dtype=torch.int64), old[:, :31]):
        assert vllm.rebalance(loads, 32, 1, 1, 8, useless).shape == (5, 32)


def test_the_plugin_leaves_vllm_alone_unless_told(monkeypatch) -> None:
    from deepinfer_eplb.peers import vllm

    called: list[int] = []
    monkeypatch.setattr(vllm, "install", lambda: called.append(1))
    for value, count in ((None, 0), ("0", 0), ("1", 1)):
        monkeypatch.delenv(vllm.SWITCH, raising=False)
        if value is not None:
            monkeypatch.setenv(vllm.SWITCH, value)
        vllm.plugin()
        assert len(called) == count


def test_sglang_gets_a_row_for_every_layer_of_the_model(tmp_path) -> None:
    placed = np.array([[3, 1, 2, 0, 1, 3], [0, 1, 2, 3, 3, 0]])
    target = tmp_path / "init.json"
    write_init_location(target, placed, 4, moe_layers=[1, 3], layers=5)
    held = json.loads(target.read_text())
    assert list(held) == ["physical_to_logical_map"]  # SGLang passes every key on: no other fits
    rows = np.array(held["physical_to_logical_map"])
    assert rows.shape == (5, 6)
    assert np.array_equal(rows[[1, 3]], placed)
    assert np.array_equal(rows[[0, 2, 4]], initial_placement(3, 4, 6))
    assert [p.name for p in tmp_path.iterdir()] == ["init.json"]


@pytest.mark.parametrize(
    ("name", "named", "says"),
    [
        ("x.pt", {}, "end in .json"),
        ("x.json", {"moe_layers": [0]}, "2 different layers"),
        ("x.json", {"moe_layers": [0, 0]}, "2 different layers"),
        ("x.json", {"moe_layers": [0, 7], "layers": 3}, r"0\.\.2"),
    ],
)
def test_wrong_layers_are_refused_by_name(tmp_path, name, named, says) -> None:
    with pytest.raises(ShapeError, match=says):
        write_init_location(tmp_path / name, initial_placement(2, 4, 6), 4, **named)
    assert not list(tmp_path.iterdir())


def test_recordings_of_sglang_are_read_and_others_named(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    counts = torch.arange(24).reshape(2, 3, 4)
    torch.save({"logical_count": counts, "rank": 0}, tmp_path / "rec.pt")
    assert np.array_equal(read_recording(tmp_path / "rec.pt"), counts.numpy())
    (tmp_path / "rec.json").write_text(json.dumps({"logical_count": counts[0].tolist()}))
    assert read_recording(tmp_path / "rec.json").shape == (1, 3, 4)
    (tmp_path / "odd.json").write_text("[1]")
    (tmp_path / "bad.pt").write_bytes(b"nothing of torch")
    for name in ("odd.json", "bad.pt"):
        with pytest.raises(LoadError, match=name):
            read_recording(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_recording(tmp_path / "none.pt")


def test_misuse_is_an_error_of_this_package() -> None:
    for arguments in ((np.ones((2, 8)), 9, 1, 1, 4), (np.ones((2, 8)), 4, 1, 1, 4)):
        with pytest.raises(EplbError):
            rebalance_from(*arguments)
