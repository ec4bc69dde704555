"""The long run on failing files, in short; that it can fail; and what fsck makes of each damage."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.faultrun import PLAN, FaultRun, run_faults
from deepinfer_kvtier.faults import FaultIo

BLOCK_BYTES, SLOT = 5_000, 8_192


@pytest.mark.slow
def test_no_wrong_byte_whatever_fails(tmp_path):
    """The short form of `nox -s kvtier-faults`, which goes on for a million records."""
    often = ("preadv", "pwritev", "datasync", "disk_bytes")
    expected = {f"{op} {effect}" for op in often for effect, p in PLAN[op].items() if p >= 0.01}
    expected.add("power loss, writes undone")
    run = FaultRun()
    # A busy machine writes less often between two reads: it goes on until every fault has struck.
    for seed in range(11, 41):
        run += run_faults(tmp_path / f"store-{seed}", reads=5_000, seed=seed)
        assert run.wrong == 0
        struck = expected <= set(+run.injected) and run.noticed["corrupt"] > 0
        ended = {"closed", "killed", "power lost"} <= set(run.lives)
        if run.reads >= 15_000 and run.from_disk >= 5_000 and struck and ended:
            break
    else:
        pytest.fail(f"never seen: {expected - set(+run.injected)}, ends {dict(run.lives)}")


BROKEN = textwrap.dedent(
    """
    import sys
    from deepinfer_kvtier import faultrun
    from deepinfer_kvtier.base import native

    native.routines = None

    def constant(views):
        return bytes(16)

    for name, module in list(sys.modules.items()):
        if name.startswith("deepinfer_kvtier") and hasattr(module, "checksum_of"):
            module.checksum_of = constant
    sys.argv = ["faultrun", "--reads", "15000", "--where", sys.argv[1]]
    faultrun.main()
    """
)


def test_the_run_fails_for_a_build_without_checksums(tmp_path):
    command = [sys.executable, "-c", BROKEN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "wrong: 0" not in done.stdout
    assert "preadv flip" in done.stdout


def test_the_run_names_the_extra_it_lacks(tmp_path):
    lacking = (
        "import sys; sys.modules['zstandard'] = None\n"
        "from deepinfer_kvtier import faultrun\n"
        "sys.argv = ['faultrun', '--reads', '100', '--compression', 'shuffle+zstd-1']\n"
        "faultrun.main()"
    )
    command = [sys.executable, "-c", lacking]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert 'extra "zstd"' in done.stderr


def test_a_power_loss_takes_what_was_not_safe_and_nothing_else(tmp_path):
    io = FaultIo(1, track=True)
    fd = io.create(tmp_path / "file")
    io.pwritev(fd, [b"safe"], 0)
    io.datasync(fd)
    for at in range(4, 44, 4):
        io.pwritev(fd, [b"lost"], at)
    undone = io.power_loss()
    content = (tmp_path / "file").read_bytes()
    assert content[:4] == b"safe"
    assert 0 < undone < 10
    assert content.count(bytes(4)) == undone


def flip(path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def fill_with(path, start: int, length: int, content: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[start : start + length] = content
    path.write_bytes(raw)


def swap_slots(path) -> None:
    raw = bytearray(path.read_bytes())
    one, two = slice(4096, 4096 + SLOT), slice(4096 + SLOT, 4096 + 2 * SLOT)
    raw[one], raw[two] = raw[two], raw[one]
    path.write_bytes(raw)


def copy_of(path, start: int, length: int) -> bytes:
    return path.read_bytes()[start : start + length]


# What lies on disk after it, as a change to the one segment and the one log of a closed writer;
# frame 0 holds chain 1, frame 1 chain 2, frame 2 chain 3; then come the seal and the end.
DAMAGE = {
    "flipped payload bit": lambda seg, log: flip(seg, 4096 + SLOT + 99),
    "flipped trailer bit": lambda seg, log: flip(seg, 4096 + SLOT + BLOCK_BYTES + 60),
    "flipped magic bit": lambda seg, log: flip(seg, 4096 + SLOT + BLOCK_BYTES),
    "lost write": lambda seg, log: fill_with(seg, 4096 + SLOT, SLOT, bytes(SLOT)),
    "torn write": lambda seg, log: fill_with(seg, 4096 + SLOT + 2_000, 6_192, bytes(6_192)),
    "short write": lambda seg, log: os.truncate(seg, 4096 + 5 * SLOT + 100),
    "duplicated slot": lambda seg, log: fill_with(seg, 4096 + SLOT, SLOT, copy_of(seg, 4096, SLOT)),
    "swapped slots": lambda seg, log: swap_slots(seg),
    "lost segment": lambda seg, log: seg.unlink(),
    "flipped frame bit": lambda seg, log: flip(log, 4096 + 100),
    "lost frame": lambda seg, log: fill_with(log, 4096, 4096, bytes(4096)),
    "duplicated frame": lambda seg, log: fill_with(log, 4096, 4096, copy_of(log, 0, 4096)),
    "torn frame": lambda seg, log: fill_with(log, 4096 + 100, 3_996, bytes(3_996)),
    "torn end of log": lambda seg, log: os.truncate(log, log.stat().st_size - 1_000),
    "lost log": lambda seg, log: log.unlink(),
}
UNFINISHED = {"torn end of log", "lost log"}
"""Not damage to records: what a killed process leaves. A repair adopts it, and nothing is lost."""


@pytest.mark.parametrize("name", DAMAGE)
def test_fsck_finds_and_repairs_every_damage_the_fault_layer_can_make(store, make_model, cli, name):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        for seed in (1, 2, 3):
            assert model.store(model.prompt(seed, 2), durability="flushed").wait(60)
    (segment,), (log,) = store.rglob("*.kvs"), store.rglob("idx-0.kvx")
    DAMAGE[name](segment, log)
    found = cli.run("fsck", store, "--json")
    assert found.returncode == (0 if name in UNFINISHED else 1), found.stdout + found.stderr
    repaired = cli.run("fsck", store, "--repair", "--json")
    assert repaired.returncode == 0, repaired.stderr
    again = cli.run("fsck", store, "--json")
    assert again.returncode == 0, again.stdout
    with kvtier.open(store, host_bytes=0) as cache:
        model = make_model(cache)
        for seed in (1, 2, 3):
            tokens = model.prompt(seed, 2)
            matched, good = model.load_all(tokens)
            assert matched == good, "after a repair the index names whole records only"
            if name in UNFINISHED:
                assert good == 2, "nothing was lost"
            assert model.store(tokens, durability="flushed").wait(60)
            assert model.load_all(tokens) == (2, 2)


def test_a_repair_keeps_drops_whose_log_was_damaged_elsewhere(store, make_model, cli):
    """The good tombstone of a rewritten log moves with it."""
    with kvtier.open(store) as cache:
        model = make_model(cache)
        kept = model.prompt(9, 2)
        model.store(kept, durability="flushed").wait(60)
    with kvtier.open(store) as cache:
        model = make_model(cache)
        model.store(model.prompt(1, 2), durability="flushed").wait(60)
        model.ns.drop(model.digests(kept)[1:])
        model.store(model.prompt(2, 2), durability="flushed").wait(60)
    newest = max(store.rglob("idx-0.kvx"), key=lambda log: log.stat().st_mtime_ns)
    flip(newest, 100)
    assert cli.facts("fsck", store, "--repair")["rewritten_logs"] == 1
    with kvtier.open(store) as cache:
        model = make_model(cache)
        assert model.block_hits(kept) == 1
        assert model.load_all(model.prompt(2, 2)) == (2, 2)


def take_every_byte(path) -> None:
    with path.open("wb", buffering=0) as others, contextlib.suppress(OSError):
        while True:
            others.write(bytes(4096))


def test_a_small_full_disk_refuses_serves_and_recovers(tmp_path, make_model, make_store):
    """A real file system of 3 MiB; mounting one takes root."""
    where = tmp_path / "small"
    where.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(where)]
    if os.geteuid() != 0 or mount is None or subprocess.run(command, check=False).returncode:
        pytest.skip("cannot mount a file system here: that takes root")
    try:
        store = make_store(where / "store")
        with kvtier.open(store, segment_bytes=1 << 18, floor_s=0) as cache:
            model = make_model(cache)
            full = False
            for seed in range(100):
                ticket = model.store(model.prompt(seed, 4), durability="flushed")
                full |= not ticket.wait(60)
                if full:
                    break
            assert full, "three megabytes hold less than five"
            assert model.load_all(model.prompt(0, 4)) == (4, 4)
            take_every_byte(where / "neighbours")  # of what is too little for a batch
            with pytest.raises(kvtier.ConfigError, match="cannot store the policy"):
                kvtier.init(store, quota_bytes=1 << 20)
        take_every_byte(where / "others")
        with kvtier.open(store, min_free_share=0.3, floor_s=0) as cache:
            model = make_model(cache)
            assert cache.gc().segments_evicted > 0, "deleting works on a disk without a free byte"
            assert model.store(model.prompt(500, 4), durability="flushed").wait(60)
        with kvtier.open(store, host_bytes=0) as cache:
            model = make_model(cache)
            assert model.load_all(model.prompt(500, 4)) == (4, 4)
            for seed in range(100):
                matched, good = model.load_all(model.prompt(seed, 4))
                assert matched == good
    finally:
        subprocess.run(["umount", str(where)], check=True)
