"""Score and speed of extraction beside the two libraries it builds on, and the floors it must hold.

    python benches/gate_extraction.py CORPUS_FOLDER [--limit N] [--cross-validate] [--floors]

Prints one row per system: quality by `extraction_corpus.score`, also by page type, CPU pages per
second, and the ratio to trafilatura. Quality of the shipped model on the corpus it was fitted on is
an upper bound; --cross-validate (needs the `train` extra) adds the figure to believe, from pages of
hosts the model had not seen. With --floors the run fails when a figure is below its entry in
`extraction_floors.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from extraction_corpus import Sample, read_corpus, score

from deepinfer_search_fetch import extract_markdown
from deepinfer_search_fetch.extract import extract
from deepinfer_search_fetch.extract.candidates import resiliparse_text, trafilatura_text
from deepinfer_search_fetch.extract.dom import parse_html
from deepinfer_search_fetch.extract.present import to_text
from deepinfer_search_fetch.net.charset import decode_text

FLOORS = Path(__file__).with_name("extraction_floors.json")
FIGURES = ("word_f1", "word_f1.macro", "shingle_f1", "segment_f1", "boilerplate_kept")


def trafilatura(page: bytes) -> str:
    tree, _ = parse_html(decode_text(page)[0])
    return "" if tree is None else trafilatura_text(tree)


SYSTEMS: dict[str, Callable[[bytes], str]] = {
    "trafilatura": trafilatura,
    "resiliparse": lambda page: resiliparse_text(decode_text(page)[0]),
    "ours, fast": lambda page: to_text(extract(page, mode="fast").content),
    "ours, article": lambda page: to_text(extract_markdown(page)),
}


def measure(samples: list[Sample]) -> dict[str, dict[str, float]]:
    """Figures of every system, with its pages per CPU second as `rate`."""
    results: dict[str, dict[str, float]] = {}
    for name, system in SYSTEMS.items():
        system(samples[0].page)  # imports and caches are not what is measured
        started = time.process_time()
        texts = {s.id: system(s.page) for s in samples}
        rate = len(samples) / (time.process_time() - started)
        results[name] = {**score(samples, texts), "rate": rate}
    return results


def cross_validated(samples: list[Sample]) -> dict[str, float]:
    from train_extraction import cross_validate, read_pages

    divisions = cross_validate(samples, read_pages(samples))
    return {name: sum(values) / len(values) for name, values in divisions.items()}


def show(results: dict[str, dict[str, float]]) -> None:
    base = results["trafilatura"]["rate"]
    types = sorted({k for r in results.values() for k in r if k.startswith("word_f1.")})
    types = [t for t in types if t != "word_f1.macro"]
    print(f"{'system':24}" + "".join(f"{c:>17}" for c in FIGURES) + f"{'pages/s':>9}{'ratio':>7}")
    for name, r in results.items():
        speed = f"{r['rate']:>9.1f}{r['rate'] / base:>7.2f}" if "rate" in r else ""
        print(f"{name:24}" + "".join(f"{r.get(c, float('nan')):>17.4f}" for c in FIGURES) + speed)
    print(f"\n{'word F1 by page type':24}" + "".join(f"{t[8:]:>14}" for t in types))
    for name, r in results.items():
        print(f"{name:24}" + "".join(f"{r.get(t, float('nan')):>14.3f}" for t in types))


def below_floor(results: dict[str, dict[str, float]]) -> list[str]:
    """What a system that has floors misses; `boilerplate_kept` is a ceiling."""
    missed: list[str] = []
    for system, floors in json.loads(FLOORS.read_text("utf-8")).items():
        if system not in results:
            continue
        for name, bound in floors.items():
            value = results[system].get(name, float("nan"))
            good = value <= bound if name == "boilerplate_kept" else value >= bound
            if not good:
                missed.append(f"{system}: {name} is {value:.4f}, its floor is {bound}")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--cross-validate", action="store_true")
    parser.add_argument("--floors", action="store_true")
    arguments = parser.parse_args()
    if not arguments.corpus.is_dir():
        parser.exit(0, f"skipped: no corpus at {arguments.corpus}\n")
    samples = list(read_corpus(arguments.corpus))[: arguments.limit]
    results = measure(samples)
    if arguments.cross_validate:
        results["ours, cross-validated"] = cross_validated(samples)
    show(results)
    missed = below_floor(results) if arguments.floors else []
    if missed:
        parser.exit(1, "below the floor:\n  " + "\n  ".join(missed) + "\n")


if __name__ == "__main__":
    main()
