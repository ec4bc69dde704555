"""How large the house is: lines by layer, modules at the top, files in one block's life.

usage: python benches/house.py [--names]

The life of a block: it is put, found, loaded from memory and from the folder, and evicted from
both; every file and function of the package that runs meanwhile, in any thread, is counted.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import deepinfer_kvtier as kvtier

SOURCE = Path(kvtier.__file__).parent
CORE = ("base", "log", "host", "flow", "api")
SIZE, BLOCKS = 40_000, 8


def lines_by_layer() -> dict[str, int]:
    """Lines of every folder, and of what stands at the top."""
    counted: dict[str, int] = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        layer = parts[0] if len(parts) > 1 else "top"
        counted[layer] = counted.get(layer, 0) + len(path.read_text().splitlines())
    return counted


def life_of_a_block() -> tuple[set[str], set[tuple[str, str]]]:
    """Files, and (file, function), that run while a block is put, found, loaded and evicted."""
    functions: set[tuple[str, str]] = set()
    watching = False

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if watching and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(str(SOURCE)):
                file = str(Path(code.co_filename).relative_to(SOURCE))
                functions.add((file, code.co_qualname))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        with tempfile.TemporaryDirectory() as folder:
            layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", SIZE))})
            settings: dict[str, Any] = {"min_free_share": 0.0, "gc_interval_s": 3600}
            # Host memory for less than the blocks, a quota for a few turns.
            with kvtier.open(
                folder, host_bytes=6 * SIZE, quota_bytes=32 * SIZE, **settings
            ) as cache:
                ns = cache.namespace(layout, model="m", salt="t")
                watching = True
                for turn in range(6):
                    tokens = np.arange(BLOCKS * 128 + 1) + turn
                    with ns.match(tokens) as match:
                        source = np.full((BLOCKS, SIZE), turn, np.uint8)
                        ns.put(match.digests, source, durability="flushed").wait(20)
                    with ns.match(tokens) as match:  # from memory, and what it has lost from disk
                        room = np.zeros((match.n_blocks, SIZE), np.uint8)
                        assert ns.load(match, dst=room, wait=True).wait().ok
                        assert match.n_blocks == BLOCKS
                watching = False
                assert cache.stats()["host"]["evicted"], "nothing left memory"
                assert cache.stats()["disk"]["gc_evicted_segments"], "nothing left the folder"
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)
    return {file for file, _ in functions if not file.endswith("__init__.py")}, functions


def main() -> None:
    counted = lines_by_layer()
    for layer in (*CORE, *sorted(counted.keys() - set(CORE))):
        print(f"{layer:14} {counted[layer]:6} lines")
    print(f"core: {sum(counted[layer] for layer in CORE)} lines ({', '.join(CORE)})")
    print(f"modules at the top: {len(list(SOURCE.glob('*.py')))}")
    files, functions = life_of_a_block()
    print(
        f"put, match, load and eviction of a block: {len(files)} files, {len(functions)} functions"
    )
    if "--names" in sys.argv:
        for file in sorted(files):
            print(f"  {file} {sum(name == file for name, _ in functions)}")


if __name__ == "__main__":
    main()
