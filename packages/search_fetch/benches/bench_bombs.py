"""What hostile bodies of every kind cost an extraction worker: CPU seconds and peak memory.

    python benches/bench_bombs.py [--only WORD]

Every body is read in a fresh worker, in the three modes where it is HTML, under the limits that
ship (2 s of CPU, 300 MiB). "ok" is a document (perhaps cut), another word the error. A row is
marked when the worker had to be ended by its limits.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hostile_pages import HOSTILE

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.extract.document import Job
from deepinfer_search_fetch.extract.html import HtmlOptions
from deepinfer_search_fetch.extract.worker import header_of
from deepinfer_search_fetch.extract.worker_process import WorkerFactory, WorkerLostError
from deepinfer_search_fetch.models import Format, Mode

Body = Callable[[], bytes]
FACTORY = WorkerFactory(Limits())
WORDS = "Voles live in the grass of the meadow. "


def html(text: str) -> Body:
    return lambda: f"<title>t</title>{text}".encode()


PAGES: dict[str, Body] = {name: html(text) for name, text in HOSTILE.items()} | {
    "combining marks": html("<p>" + "\u0f71\u0f72" * 1_500_000),
    "marks of many kinds": html("<p>" + "a" + "\u0300\u0316\u0301\u0323" * 700_000),
    "9 MB of CJK": html("<p>" + "水文站记录" * 600_000),
    "open scripts": html("<script>" * 200_000),
    "open comments": html("<!--" * 300_000),
    "open style": html("<style>" + ".a{color:red;" * 100_000),
    "rules that match all": html(
        "<style>" + "*{opacity:.9}" * 3000 + "</style>" + "<p class=x>a" * 3000
    ),
    "complex selectors": html(
        "<style>" + ":not(.a):nth-child(2n) ~ p > b{display:none}" * 2000 + "</style>"
        + "<p>a" * 2000
    ),
    "descendant chains": html(
        "<style>" + "div div div div div .x{display:none}" * 300 + "</style>"
        + "<div>" * 200 + "<p class=x>a" * 2000
    ),
    "custom properties": html(
        "<style>" + "".join(f":root{{--a{i}:var(--a{i + 1})}}" for i in range(2000)) + "</style>"
        + "<p style='display:var(--a0)'>a" * 2000
    ),
    "inline styles": html("<p style='color:rgb(1 2 3/calc(1 - .5));font:1px/1 a'>word" * 8000),
    "unicode classes": html("".join(f"<p class='é{i} ü{i}'>word" for i in range(15_000))),
    "json-ld": html("<script type=application/ld+json>" + "[" * 200_000 + "</script><p>x"),
    "many headings": html("<h2>a</h2>" * 25_000),
    "definition lists": html("<dl>" + "<dt>a<dd>b" * 14_000),
    "ruby": html("<p>" + "<ruby>a<rt>b</rt></ruby>" * 9_000),
    "math": html("<p>" + "<math><mfrac><mi>a</mi><mi>b</mi></mfrac></math>" * 5000),
    "srcset": html("<p><img alt=a srcset='" + "a.png 1x, " * 100_000 + "'>text"),
    "select options": html("<select>" + "<option>a" * 28_000),
    "one long word": html("<p>" + "a" * 9_000_000),
    "blank lines": html("<pre>" + "\n" * 5_000_000 + "x"),
    "long alt texts": html("".join(f"<img src=a alt='{WORDS * 40}'>" for _ in range(900))),
}  # fmt: skip


def packed(**files: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name.replace("__", "/"), data)
    return out.getvalue()


def pdf_of(pages: int) -> bytes:
    from fpdf import FPDF

    document = FPDF()
    document.set_font("helvetica", size=9)
    for _ in range(pages):
        document.add_page()
        document.multi_cell(0, 4, WORDS * 90)
    return bytes(document.output())


def pdf_stream(data: bytes) -> bytes:
    head = b"%PDF-1.7\n1 0 obj\n<</Filter/FlateDecode>>\nstream\n"
    return head + data + b"\nendstream\n%%EOF"


def docx_of_one_word() -> bytes:
    types = {"[Content_Types].xml": b"<Types/>"}
    return packed(word__document_xml=b"<w>" + b"x" * 30_000_000, **types)


OTHERS: dict[str, tuple[str, Body]] = {
    "markdown, 9 MB": ("text/markdown", lambda: (f"# T\n\n{WORDS}\n\n" * 190_000).encode()),
    "markdown of links": ("text/markdown", lambda: b"[a](b/c) " * 900_000),
    "markdown of brackets": ("text/markdown", lambda: b"[" * 5_000_000),
    "markdown of marks": ("text/markdown", lambda: b"*a **b _c " * 500_000),
    "json, 20 MB": ("application/json", lambda: b"[" + b'{"a":1,"b":[2]},' * 1_300_000 + b"0]"),
    "json, deep": ("application/json", lambda: b"[" * 900 + b"1," * 400_000 + b"1" + b"]" * 900),
    "json, one string": ("application/json", lambda: b'"' + b"a" * 9_000_000 + b'"'),
    "json, not closed": ("application/json", lambda: b'{"a":' * 1_000_000),
    "csv, wide": ("text/csv", lambda: b"a," * 4_000_000),
    "csv, long": ("text/csv", lambda: b"a,b,c\n" * 1_500_000),
    "xml, 9 MB": ("application/xml", lambda: b"<?xml version='1.0'?><a>" + b"<b/>" * 2_000_000),
    "feed of entries": (
        "application/rss+xml",
        lambda: b"<rss><channel>" + b"<item><title>a</title></item>" * 300_000,
    ),
    "feed of fields": (
        "application/rss+xml",
        lambda: b"<rss><channel><item>" + b"<title>a</title>" * 400_000,
    ),
    "text of line ends": ("text/plain", lambda: b"\r\n" * 4_000_000),
    "text, 60 MB": ("text/plain", lambda: WORDS.encode() * 1_500_000),
    "text of blanks": ("text/plain", lambda: b" " * 9_000_000 + b"x"),
    "text of backticks": ("text/plain", lambda: b"` " * 4_000_000),
    "pdf, 500 pages": ("application/pdf", lambda: pdf_of(500)),
    "pdf stream": ("application/pdf", lambda: pdf_stream(zlib.compress(bytes(200_000_000)))),
    "docx of one word": ("application/zip", docx_of_one_word),
    "zip of zeros": ("application/zip", lambda: packed(a=bytes(280_000_000))),
    "gzip in the body": ("application/gzip", lambda: gzip.compress(bytes(100_000_000))),
}  # fmt: skip


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(body: bytes, content_type: str, mode: Mode, form: Format) -> tuple[str, float, float]:
    """(outcome, CPU seconds, peak MiB) in a worker of its own."""
    worker = FACTORY.start()
    before = cpu_seconds(worker.pid)
    job = Job("https://a.example/x", content_type, HtmlOptions(mode=mode), form)
    try:
        answer, _ = worker.ask(header_of(job), body)
        outcome = answer["error"]["code"] if "error" in answer else "ok"
        used, peak = cpu_seconds(worker.pid) - before, answer["peak_bytes"] / 2**20
    except WorkerLostError as lost:
        outcome, used, peak = f"ENDED by {lost.limit}", Limits().extract_cpu_seconds, float("nan")
    worker.stop()
    return outcome, used, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    rows: list[tuple[str, float, float]] = []
    print(f"{'body':28}{'mode':10}{'outcome':28}{'CPU s':>7}{'MiB':>6}")
    forms: tuple[Format, ...] = ("markdown", "html")
    cases: list[tuple[str, str, Callable[[], bytes], Mode, Format]] = [
        (n, "text/html", b, m, "markdown") for n, b in PAGES.items() for m in get_args(Mode)
    ]
    cases += [(n, c, b, "full", f) for n, (c, b) in OTHERS.items() for f in forms]
    for name, content_type, body, mode, form in cases:
        if only in name:
            outcome, used, peak = run(body(), content_type, mode, form)
            rows.append((outcome, used, peak))
            label = mode if content_type == "text/html" else form
            print(f"{name:28}{label:10}{outcome:28}{used:7.2f}{peak:6.0f}", flush=True)
    FACTORY.close()
    ended = sum(o.startswith("ENDED") for o, _, _ in rows)
    worst = max((used for o, used, _ in rows if not o.startswith("ENDED")), default=0.0)
    print(
        f"{len(rows)} runs, {ended} ended by a limit; the slowest other took {worst:.2f} s of CPU"
    )


if __name__ == "__main__":
    main()
