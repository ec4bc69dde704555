"""Score and speed of extraction beside the two libraries it builds on.

    python benches/gate_extraction.py CORPUS_FOLDER [--limit N]

Prints one row per system: quality by `extraction_corpus.score`, CPU pages per second, and the ratio
to trafilatura. Quality of the shipped model on the corpus it was trained on is an upper bound; the
cross-validated figure comes from `train_extraction.py --cross-validate`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from extraction_corpus import read_corpus, score

from deepinfer_search_fetch import extract_markdown
from deepinfer_search_fetch.extract import extract
from deepinfer_search_fetch.extract.candidates import resiliparse_text, trafilatura_text
from deepinfer_search_fetch.extract.dom import parse_html
from deepinfer_search_fetch.net.charset import decode_text
from deepinfer_search_fetch.present import to_text


def trafilatura(page: bytes) -> str:
    tree, _ = parse_html(decode_text(page)[0])
    return "" if tree is None else trafilatura_text(tree)


SYSTEMS: dict[str, Callable[[bytes], str]] = {
    "trafilatura": trafilatura,
    "resiliparse": lambda page: resiliparse_text(decode_text(page)[0]),
    "ours, article": lambda page: to_text(extract_markdown(page)),
    "ours, fast": lambda page: to_text(extract(page, mode="fast").content),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--limit", type=int, default=None)
    arguments = parser.parse_args()
    if not arguments.corpus.is_dir():
        parser.exit(0, f"skipped: no corpus at {arguments.corpus}\n")
    samples = list(read_corpus(arguments.corpus))[: arguments.limit]
    columns = ("word_f1", "word_f1.macro", "shingle_f1", "segment_f1", "boilerplate_kept")
    print(f"{'system':16}" + "".join(f"{c:>18}" for c in columns) + f"{'pages/s':>10}{'ratio':>8}")
    base = 0.0
    for name, system in SYSTEMS.items():
        system(samples[0].page)  # imports and caches are not what is measured
        started = time.process_time()
        texts = {s.id: system(s.page) for s in samples}
        rate = len(samples) / (time.process_time() - started)
        base = base or rate
        result = score(samples, texts)
        figures = "".join(f"{result.get(c, float('nan')):>18.4f}" for c in columns)
        print(f"{name:16}{figures}{rate:>10.1f}{rate / base:>8.2f}")


if __name__ == "__main__":
    main()
