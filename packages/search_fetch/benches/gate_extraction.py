"""Quality and speed of extraction beside the two libraries it builds on, and its floors.

    python benches/gate_extraction.py CORPUS_FOLDER [--limit N] [--cross-validate] [--floors]
        [--json FILE] [--readme FILE]

Prints one row per system: quality by `extraction_corpus.score`, also by page type, how many of the
structure fixtures of `tests/test_structure.py` it keeps, CPU pages per second, and the ratio to
trafilatura. Quality of a shipped model on the corpus it was fitted on is an upper bound;
--cross-validate (needs the `train` extra) adds the figures to believe, from pages of hosts the
model had not seen. With --floors the run fails when a figure is below its entry in
`extraction_floors.json`. --json keeps the figures; --readme writes them into the tables of a page,
between its marks, from such a file or from this run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from extraction_corpus import Sample, read_corpus, score

from deepinfer_search_fetch.extract import extract
from deepinfer_search_fetch.extract.candidates import resiliparse_text, trafilatura_text
from deepinfer_search_fetch.extract.dom import parse_html
from deepinfer_search_fetch.extract.present import to_text
from deepinfer_search_fetch.net.charset import decode_text

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
FLOORS = Path(__file__).with_name("extraction_floors.json")
FIGURES = ("word_f1", "word_f1.macro", "shingle_f1", "segment_f1", "boilerplate_kept")
Results = dict[str, dict[str, float]]


def trafilatura(page: bytes) -> str:
    tree, _ = parse_html(decode_text(page)[0])
    return "" if tree is None else trafilatura_text(tree)


def trafilatura_markdown(page: bytes) -> str:
    from trafilatura import extract as theirs

    found = theirs(
        decode_text(page)[0],
        url="https://birds.example/guide/kestrel.html",
        output_format="markdown",
        include_links=True,
        include_formatting=True,
    )
    return found or ""


def resiliparse_formatted(page: bytes) -> str:
    from resiliparse.extract.html2text import extract_plain_text

    return extract_plain_text(
        decode_text(page)[0], main_content=True, preserve_formatting=True, list_bullets=True
    )


TEXTS: dict[str, Callable[[bytes], str]] = {
    "trafilatura": trafilatura,
    "resiliparse": lambda page: resiliparse_text(decode_text(page)[0]),
    "ours, fast": lambda page: to_text(extract(page, mode="fast").content),
    "ours, article": lambda page: to_text(extract(page).content),
}
STRUCTURED: dict[str, Callable[[bytes], str]] = {
    "trafilatura": trafilatura_markdown,
    "resiliparse": resiliparse_formatted,
    "ours, fast": lambda page: extract(page, STRUCTURE_URL, mode="fast").content,
    "ours, article": lambda page: extract(page, STRUCTURE_URL).content,
}
STRUCTURE_URL = "https://birds.example/guide/kestrel.html"


def measure(samples: list[Sample]) -> Results:
    """Figures of every system, with its pages per CPU second as `rate`."""
    results: Results = {}
    for name, system in TEXTS.items():
        system(samples[0].page)  # imports and caches are not what is measured
        started = time.process_time()
        texts = {s.id: system(s.page) for s in samples}
        rate = len(samples) / (time.process_time() - started)
        results[name] = {**score(samples, texts), "rate": rate, **structure(STRUCTURED[name])}
    return results


def structure(system: Callable[[bytes], str]) -> dict[str, float]:
    """How many of the structure fixtures a system keeps, and of how many."""
    from test_structure import CASES, holds, page

    kept = sum(holds(system(page(name, html)), expected) for name, html, expected in CASES)
    return {"structure": kept, "structure_cases": len(CASES)}


def cross_validated(samples: list[Sample], mode: str) -> dict[str, float]:
    from train_extraction import cross_validate, read_pages

    divisions = cross_validate(samples, read_pages(samples, mode))
    return {name: sum(values) / len(values) for name, values in divisions.items()}


def page_types(results: Results) -> list[str]:
    names = {k for r in results.values() for k in r if k.startswith("word_f1.")}
    return sorted(names - {"word_f1.macro"})


def show(results: Results) -> None:
    base = results["trafilatura"]["rate"]
    head = "".join(f"{c:>17}" for c in FIGURES)
    print(f"{'system':28}{head}{'structure':>11}{'pages/s':>9}{'ratio':>7}")
    for name, r in results.items():
        kept = f"{r['structure']:.0f}/{r['structure_cases']:.0f}" if "structure" in r else ""
        speed = f"{r['rate']:>9.1f}{r['rate'] / base:>7.2f}" if "rate" in r else ""
        figures = "".join(f"{r.get(c, float('nan')):>17.4f}" for c in FIGURES)
        print(f"{name:28}{figures}{kept:>11}{speed}")
    types = page_types(results)
    print(f"\n{'word F1 by page type':28}" + "".join(f"{t[8:]:>14}" for t in types))
    for name, r in results.items():
        print(f"{name:28}" + "".join(f"{r.get(t, float('nan')):>14.3f}" for t in types))


def tables(results: Results) -> dict[str, str]:
    """The tables of the page on this package, by the name of their marks."""
    columns = ("system", "word F1", "macro over page types", "shingle F1", "segment F1",
               "boilerplate kept", "structure", "pages per CPU second")  # fmt: skip
    rows = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, r in results.items():
        figures = [f"{r[c]:.3f}" for c in FIGURES[:4]] + [f"{100 * r[FIGURES[4]]:.1f} %"]
        kept = f"{r['structure']:.0f} of {r['structure_cases']:.0f}" if "structure" in r else ""
        speed = f"{r['rate']:.1f}" if "rate" in r else ""
        rows.append(f"| {' | '.join([name, *figures, kept, speed])} |")
    types = page_types(results)
    by_type = [f"| word F1 by page type | {' | '.join(t[8:] for t in types)} |"]
    by_type.append("|" + "---|" * (len(types) + 1))
    for name, r in results.items():
        if name not in ("ours, fast", "ours, article"):
            by_type.append(f"| {' | '.join([name, *(f'{r[t]:.3f}' for t in types)])} |")
    return {"extraction": "\n".join(rows), "extraction by type": "\n".join(by_type)}


def write_readme(page: Path, results: Results) -> None:
    text = page.read_text("utf-8")
    for name, table in tables(results).items():
        pattern = re.compile(rf"(<!-- {name} -->\n)(?:[^<].*?\n)?(<!-- end -->)", re.S)
        text, count = pattern.subn(lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text)
        if count != 1:
            raise SystemExit(f"{page} has {count} places marked <!-- {name} -->, not 1")
    page.write_text(text, "utf-8")


def below_floor(results: Results) -> list[str]:
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
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--readme", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.corpus.suffix == ".json":  # the figures of an earlier run
        results: Results = json.loads(arguments.corpus.read_text("utf-8"))
    elif not arguments.corpus.is_dir():
        parser.exit(0, f"skipped: no corpus at {arguments.corpus}\n")
    else:
        samples = list(read_corpus(arguments.corpus))[: arguments.limit]
        results = measure(samples)
        for mode in ("fast", "article") if arguments.cross_validate else ():
            results[f"ours, {mode}, cross-validated"] = cross_validated(samples, mode)
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.readme:
        write_readme(arguments.readme, results)
    missed = below_floor(results) if arguments.floors else []
    if missed:
        parser.exit(1, "below the floor:\n  " + "\n  ".join(missed) + "\n")


if __name__ == "__main__":
    main()
