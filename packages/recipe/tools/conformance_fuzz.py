"""Differential fuzz against the reference codec: generated requests, and answers in random cuts.

    pip install './packages/recipe[test,conformance]'
    python tools/conformance_fuzz.py --requests 20000 --streams 5000 --seed 1

Every case runs through both codecs. A difference is either explained by a named decision
(counted in the table, each with a test of its own), or it is printed with the seed that makes it
again, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import fuzz_requests
import fuzz_streams

Case = Callable[[random.Random], tuple[str | None, Any]]
SHOWN = 8
SHOWN_CHARS = 2000


def run(name: str, case: Case, seed: int, count: int) -> bool:
    """Run `count` cases; print the table; whether all differences are explained."""
    explained: collections.Counter[str] = collections.Counter()
    failures: list[tuple[str, Any]] = []
    for number in range(count):
        label = f"{name}:{seed}:{number}"
        try:
            category, detail = case(random.Random(label))
        except Exception as error:
            category, detail = "unexplained", f"{type(error).__name__}: {error}"
        if category == "unexplained":
            failures.append((label, detail))
        elif category is not None:
            explained[category] += 1
    same = count - explained.total() - len(failures)
    print(f"{name}: {count} cases, {same} equal, {len(failures)} unexplained")
    for category, times in sorted(explained.items()):
        print(f"  {times:6} {category}")
    for label, detail in failures[:SHOWN]:
        text = detail if isinstance(detail, str) else json.dumps(detail, ensure_ascii=False)
        print(f"  UNEXPLAINED {label}: {text[:SHOWN_CHARS]}")
    return not failures


def main() -> int:
    """Run both kinds, or one case again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", help="run the one case with this label and show it")
    options = parser.parse_args()
    kinds: dict[str, Case] = {"requests": fuzz_requests.case, "streams": fuzz_streams.case}
    if options.again:
        category, detail = kinds[options.again.split(":")[0]](random.Random(options.again))
        print(category, json.dumps(detail, ensure_ascii=False, indent=1))
        return int(category == "unexplained")
    counts = {"requests": options.requests, "streams": options.streams}
    results = [run(name, kinds[name], options.seed, counts[name]) for name in kinds]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
