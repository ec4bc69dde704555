"""The table of speed in the README is the one that its bench wrote down."""

from __future__ import annotations

import json
import sys
from pathlib import Path

BENCHES = Path(__file__).parent.parent / "benches"


def test_the_table_of_the_readme_comes_from_the_saved_run(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    import bench_fast

    page = bench_fast.PAGE.read_text()
    assert bench_fast.page_with(json.loads(bench_fast.RESULT.read_text()), page) == page
    for name in ("bench_fast", "goal_common", "goal_disk", "goal_stores", "peers"):
        sys.modules.pop(name, None)
