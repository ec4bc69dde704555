"""PDF pages a CPU second: ours with layout beside the plain text of the library under it.

    python benches/bench_documents.py [PAGES]

Needs fpdf2 (the test extra) to make the document.
"""

from __future__ import annotations

import sys
import time

import pypdfium2
from fpdf import FPDF

from deepinfer_search_fetch.extract import extract

TEXT = "Voles live in meadows where the grass is tall enough to hide them from kestrels. "


def make(pages: int) -> bytes:
    """Two columns of 9 pt text a page, with a heading and a running head."""
    pdf = FPDF()
    pdf.set_auto_page_break(False)
    for page in range(pages):
        pdf.add_page()
        pdf.set_font("Helvetica", size=8)
        pdf.set_xy(10, 5)
        pdf.cell(text=f"Journal of Voles {page}")
        pdf.set_font("Helvetica", "B", 14)
        pdf.set_xy(10, 15)
        pdf.cell(text=f"Section {page}")
        pdf.set_font("Times", size=9)
        for x in (10, 110):
            pdf.set_xy(x, 25)
            pdf.multi_cell(90, 4, text=TEXT * 35, align="J")
    return bytes(pdf.output())


def plain(body: bytes) -> str:
    document = pypdfium2.PdfDocument(body)
    return "".join(page.get_textpage().get_text_range() for page in document)


def main() -> None:
    pages = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    body = make(pages)
    extract(make(1))
    seconds: dict[str, float] = {}
    for name, run in (("plain text", plain), ("ours, layout", lambda b: extract(b).content)):
        started = time.process_time()
        chars = len(run(body))
        seconds[name] = time.process_time() - started
        print(f"{name:14} {pages / seconds[name]:8.0f} pages/s of CPU   {chars} characters")
    print(f"ratio {seconds['plain text'] / seconds['ours, layout']:.3f}")


if __name__ == "__main__":
    main()
