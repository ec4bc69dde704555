"""PDF, office documents and books: made by independent libraries, read by ours."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from typing import Any

import docx
import openpyxl
import pptx
import pytest
from docx.oxml import OxmlElement
from docx.oxml.ns import qn
from fpdf import FPDF
from fpdf.enums import TextMode
from hostile_pages import zeros_packed

from deepinfer_search_fetch import ContentError, LimitError, SearchFetchError
from deepinfer_search_fetch.extract import Extraction, extract
from deepinfer_search_fetch.extract.html import HtmlOptions

VOLES = "Voles live in meadows where the grass is tall enough to hide them from kestrels. "
HAWKS = "The kestrel hovers above open fields and watches the grass for voles in the evening. "


def pdf_bytes(pdf: FPDF) -> bytes:
    return bytes(pdf.output())


def paper() -> FPDF:
    """Four pages: running head, page number, title, two columns, a ruled table."""
    pdf = FPDF()
    pdf.set_title("On Voles")
    pdf.set_author("M. Arvalis")
    pdf.set_auto_page_break(False)
    for page in range(4):
        pdf.add_page()
        pdf.set_font("Helvetica", size=8)
        pdf.set_xy(10, 5)
        pdf.cell(text="Journal of Vole Studies 12")
        pdf.set_xy(100, 287)
        pdf.cell(text=str(page + 1))
        if page == 0:
            pdf.set_font("Helvetica", "B", 20)
            pdf.set_xy(10, 20)
            pdf.cell(text="On Voles and Kestrels")
        pdf.set_font("Helvetica", "B", 14)
        pdf.set_xy(10, 35)
        pdf.cell(text=f"Section {page + 1}")
        pdf.set_font("Times", size=10)
        for x, name, text in ((10, "L", VOLES), (110, "R", HAWKS)):
            pdf.set_xy(x, 45)
            pdf.multi_cell(90, 4.5, text=f"{name}{page} starts. " + text * 10, align="J")
    pdf.set_y(150)
    with pdf.table(col_widths=(30, 30, 30), width=90) as table:
        for line in (("Name", "Mass", "Length"), ("Vole | bank", "30 g", "10 cm")):
            row = table.row()
            for cell in line:
                row.cell(cell)
    return pdf


def test_a_two_column_paper_reads_column_by_column_without_its_running_heads() -> None:
    result = extract(pdf_bytes(paper()), "https://a.example/p.pdf")
    text = result.content
    assert text.startswith("# On Voles and Kestrels\n\n## Section 1\n\nL0 starts. Voles live")
    order = [text.index(mark) for mark in ("Section 1", "L0 ", "R0 ", "Section 2", "L1 ", "R1 ")]
    assert order == sorted(order)
    assert text.count(VOLES.strip()) == text.count(HAWKS.strip()) == 40
    assert "Journal of Vole Studies" not in text
    assert not re.search(r"^\d$", text, re.M)
    assert "| Name | Mass | Length |\n| --- | --- | --- |\n| Vole \\| bank | 30 g | 10 cm |" in text
    assert (result.title, result.author) == ("On Voles", "M. Arvalis")
    assert (result.content_type, result.engine) == ("application/pdf", "deepinfer-pdf")


def test_page_marks_are_written_when_asked_for() -> None:
    body = pdf_bytes(paper())
    marked = extract(body, options=HtmlOptions(page_marks=True)).content
    assert re.findall(r"<!-- page (\d) -->", marked) == ["1", "2", "3", "4"]
    assert "<!-- page" not in extract(body).content


def lines_pdf(*lines: str, size: int = 12) -> bytes:
    pdf = FPDF()
    pdf.add_page()
    pdf.set_font("Times", size=size)
    for line in lines:
        pdf.cell(text=line, new_x="LMARGIN", new_y="NEXT")
    return pdf_bytes(pdf)


def test_words_broken_at_line_ends_are_joined_and_real_hyphens_stay() -> None:
    text = extract(
        lines_pdf("The hover-", "ing kestrel is well-", "Known for its long-", "term plan")
    ).content
    assert text == "The hovering kestrel is well- Known for its longterm plan\n"


def test_lists_stay_lists() -> None:
    text = extract(
        lines_pdf("Prey:", "- voles and", "other mice", "- beetles", "1. hover", "2. dive")
    ).content
    assert text == "Prey:\n\n- voles and other mice\n- beetles\n\n1. hover\n2. dive\n"


def hidden_pdf() -> bytes:
    pdf = FPDF()
    pdf.add_page()
    pdf.set_font("Times", size=12)
    pdf.cell(text="Visible text.", new_x="LMARGIN", new_y="NEXT")
    pdf.set_text_color(255, 255, 255)
    pdf.cell(text="White secret.", new_x="LMARGIN", new_y="NEXT")
    pdf.set_fill_color(20, 20, 120)
    pdf.cell(text="White on blue.", fill=True, new_x="LMARGIN", new_y="NEXT")
    pdf.set_text_color(0, 0, 0)
    with pdf.local_context(text_mode=TextMode.INVISIBLE):
        pdf.cell(text="Invisible secret.", new_x="LMARGIN", new_y="NEXT")
    pdf.set_font("Times", size=0.5)
    pdf.cell(text="Tiny secret.", new_x="LMARGIN", new_y="NEXT")
    pdf.set_font("Times", size=12)
    pdf.set_xy(400, 50)
    pdf.cell(text="Secret off the page.")
    return pdf_bytes(pdf)


def test_text_that_no_reader_of_a_pdf_sees_is_dropped_and_counted() -> None:
    result = extract(hidden_pdf())
    assert "Visible text." in result.content
    assert "White on blue." in result.content
    assert "ecret" not in result.content
    assert any(w.startswith("hidden_text_removed:") for w in result.warnings)


def test_the_invisible_text_over_a_scan_is_its_text() -> None:
    from PIL import Image

    pdf = FPDF()
    pdf.add_page()
    pdf.image(Image.new("RGB", (60, 80), "grey"), x=0, y=0, w=210, h=297)
    pdf.set_font("Times", size=12)
    with pdf.local_context(text_mode=TextMode.INVISIBLE):
        pdf.cell(text="Recognised words.")
    assert extract(pdf_bytes(pdf)).content == "Recognised words.\n"


def test_a_scan_without_text_is_no_success_and_a_partial_one_warns() -> None:
    pdf = FPDF()
    pdf.add_page()
    with pytest.raises(ContentError, match="has a text layer") as caught:
        extract(pdf_bytes(pdf))
    assert caught.value.code == "extraction_empty"
    pdf = FPDF()
    pdf.add_page()
    pdf.set_font("Times", size=12)
    pdf.cell(text="One page of text.")
    pdf.add_page()
    assert "no_text_layer:1" in extract(pdf_bytes(pdf)).warnings


@pytest.mark.parametrize("damage", ["cut", "noise", "locked"])
def test_a_pdf_that_cannot_be_opened_is_refused(damage: str) -> None:
    pdf = paper()
    if damage == "locked":
        pdf.set_encryption(owner_password="owner", user_password="user")
    body = pdf_bytes(pdf)
    body = {"cut": body[:40], "noise": b"%PDF-1.7\n" + b"\xff\x00" * 500, "locked": body}[damage]
    with pytest.raises(ContentError) as caught:
        extract(body)
    assert caught.value.code == "unsupported_content_type"


def test_a_pdf_with_bytes_before_its_header_is_read_and_rtf_is_refused() -> None:
    body = b"HTTP noise\n" + lines_pdf("Some text.")
    assert extract(body, content_type="application/pdf").content == "Some text.\n"
    with pytest.raises(ContentError, match="application/rtf"):
        extract(b"{\\rtf1 hello}")


def raw_pdf(stream: bytes, extra: bytes = b"") -> bytes:
    """A one-page PDF by hand whose content stream is given."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Contents 4 0 R>>",
        b"<<" + extra + b"/Length " + str(len(stream)).encode() + b">>\nstream\n" + stream
        + b"\nendstream",
    ]  # fmt: skip
    out = b"%PDF-1.7\n"
    places = []
    for number, text in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n".encode() + text + b"\nendobj\n"
    table = len(out)
    out += b"xref\n0 5\n0000000000 65535 f \n"
    out += b"".join(f"{p:010} 00000 n \n".encode() for p in places)
    return out + b"trailer\n<</Size 5/Root 1 0 R>>\nstartxref\n" + str(table).encode() + b"\n%%EOF"


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pdf_stream_bomb_is_stopped_before_it_is_parsed(stages: int) -> None:
    data = zeros_packed(300)
    for _ in range(stages - 1):
        data = zlib.compress(data, 9)
    filters = b"/Filter[" + b"/FlateDecode" * stages + b"]"
    with pytest.raises(LimitError) as caught:
        extract(raw_pdf(data, filters))
    assert caught.value.code == "decompression_bomb"


def test_many_streams_count_together() -> None:
    one = zlib.compress(bytes(50_000_000), 1)
    streams = b"".join(
        b"%d 0 obj\n<</Filter/FlateDecode>>\nstream\n%b\nendstream\nendobj\n" % (n, one)
        for n in range(10, 16)
    )
    with pytest.raises(LimitError) as caught:
        extract(raw_pdf(b"q") + streams)
    assert caught.value.code == "decompression_bomb"


def word_file() -> bytes:
    document = docx.Document()
    document.core_properties.title = "Field Notes"
    document.core_properties.author = "M. Arvalis"
    document.add_heading("Notes", 0)
    document.add_heading("Prey", 1)
    paragraph = document.add_paragraph("Voles are ")
    paragraph.add_run("small").bold = True
    paragraph.add_run(" and < quick.")
    secret = paragraph.add_run(" A secret order.")
    secret.font.hidden = True
    document.add_paragraph("voles", style="List Bullet")
    document.add_paragraph("mice", style="List Bullet")
    document.add_paragraph("first", style="List Number")
    table = document.add_table(2, 2)
    for cell, text in zip(table._cells, ("Name", "Mass", "Vole", "30 g"), strict=True):
        cell.text = text
    link = document.add_paragraph("See ")
    relation = document.part.relate_to(
        "https://a.example/more",
        "http://schemas.openxmlformats.org/officeDocument/2006/relationships/hyperlink",
        is_external=True,
    )
    element = OxmlElement("w:hyperlink")
    element.set(qn("r:id"), relation)
    run = OxmlElement("w:r")
    text = OxmlElement("w:t")
    text.text = "more"
    run.append(text)
    element.append(run)
    link._p.append(element)
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def test_a_word_document_keeps_headings_lists_tables_and_links() -> None:
    result = extract(word_file())
    text = result.content
    assert "# Notes\n\n# Prey\n\nVoles are **small** and \\< quick." in text.replace(" <", " \\<")
    assert "- " in text
    assert "voles" in text
    assert "| Name | Mass |\n| --- | --- |\n| Vole | 30 g |" in text
    assert "[more](https://a.example/more)" in text
    assert result.links == [("https://a.example/more", "more")]
    assert "secret" not in text
    assert "hidden_text_removed:1" in result.warnings
    assert (result.title, result.author) == ("Field Notes", "M. Arvalis")


def test_slides_come_in_order_with_titles_and_without_hidden_ones() -> None:
    show = pptx.Presentation()
    for title, lines in (("First", ("one", "two")), ("Secret", ("no", "no")), ("Last", ("end",))):
        slide = show.slides.add_slide(show.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = "\n".join(lines)
    show.slides[1]._element.set("show", "0")
    table = show.slides[2].shapes.add_table(2, 2, 0, 0, 100, 100).table
    for i, text in enumerate(("a", "b", "c", "d")):
        table.cell(i // 2, i % 2).text = text
    out = io.BytesIO()
    show.save(out)
    result = extract(out.getvalue())
    assert result.content == (
        "## First\n\n- one\n- two\n\n## Last\n\nend\n\n| a | b |\n| --- | --- |\n| c | d |\n"
    )
    assert "hidden_text_removed:1" in result.warnings


def test_sheets_become_tables_with_dates_and_saved_values() -> None:
    from datetime import date

    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Birds"
    for row in (("name", "day", "count"), ("kestrel", date(2024, 5, 6), 3), ("owl", None, 4.5)):
        sheet.append(row)
    sheet["D1"] = "a | b"
    hidden = book.create_sheet("Secret")
    hidden.append(("secret",))
    hidden.sheet_state = "hidden"
    for i in range(1200):
        book.worksheets[0].cell(10 + i, 1, f"row {i}")
    out = io.BytesIO()
    book.save(out)
    result = extract(out.getvalue())
    assert result.content.startswith("## Birds\n\n| name | day | count | a \\| b |\n")
    assert "| kestrel | 2024-05-06 | 3 |" in result.content
    assert "| owl |  | 4.5 |" in result.content
    assert "secret" not in result.content.lower()
    assert "rows_truncated" in result.warnings
    assert result.content.count("\n| ") <= 1002


def zip_file(**parts: str | bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return out.getvalue()


ODF = (
    '<office:document-content xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0"'
    ' xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0"'
    ' xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0"'
    ' xmlns:xlink="http://www.w3.org/1999/xlink"><office:body><office:%s>%s</office:%s>'
    "</office:body></office:document-content>"
)


def test_an_open_document_text_keeps_its_structure() -> None:
    content = (
        "<text:tracked-changes><text:p>deleted</text:p></text:tracked-changes>"
        '<text:h text:outline-level="2">Prey</text:h><text:p>A<text:s/>vole &lt;'
        ' <text:a xlink:href="https://a.example/">link</text:a></text:p>'
        "<text:list><text:list-item><text:p>one</text:p></text:list-item></text:list>"
        "<table:table><table:table-row><table:table-cell><text:p>a</text:p></table:table-cell>"
        "<table:table-cell><text:p>b</text:p></table:table-cell></table:table-row>"
        '<table:table-row><table:table-cell table:number-columns-repeated="2"><text:p>c</text:p>'
        '</table:table-cell><table:table-cell table:number-columns-repeated="16000"/>'
        "</table:table-row></table:table>"
    )
    body = zip_file(**{
        "mimetype": "application/vnd.oasis.opendocument.text",
        "content.xml": ODF % ("text", content, "text"),
    })  # fmt: skip
    assert extract(body).content == (
        "## Prey\n\nA vole < [link](https://a.example/)\n\n- one\n\n"
        "| a | b |\n| --- | --- |\n| c | c |\n"
    )


def test_a_book_is_read_along_its_spine() -> None:
    def chapter(n: int) -> str:
        return (f"<!DOCTYPE html><html xmlns='http://www.w3.org/1999/xhtml'><body><h2>Ch {n}</h2>"
                f"<p>{VOLES}{n}</p><p hidden>secret</p></body></html>")  # fmt: skip

    opf = (
        '<package xmlns="http://www.idpf.org/2007/opf"'
        ' xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata><dc:title>Vole Book</dc:title>'
        '<dc:creator>M. A.</dc:creator></metadata><manifest><item id="b" href="b%20b.xhtml"/>'
        '<item id="a" href="a.xhtml"/></manifest><spine><itemref idref="a"/><itemref idref="b"/>'
        "</spine></package>"
    )
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/p.opf"/></rootfiles></container>'
    )
    result = extract(zip_file(**{
        "mimetype": "application/epub+zip", "META-INF/container.xml": container,
        "OEBPS/p.opf": opf, "OEBPS/a.xhtml": chapter(1), "OEBPS/b b.xhtml": chapter(2),
    }))  # fmt: skip
    assert result.content.index("## Ch 1") < result.content.index("## Ch 2")
    assert "secret" not in result.content
    assert (result.title, result.author) == ("Vole Book", "M. A.")


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def word_xml(body: str, prolog: str = "") -> bytes:
    text = f'{prolog}<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    return zip_file(**{"[Content_Types].xml": "<x/>", "word/document.xml": text})


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def many_entries() -> bytes:
    parts = {f"p{i}": "x" for i in range(2500)}
    return zip_file(**{"word/document.xml": "<x/>", **parts})


def large_in_sum() -> bytes:
    """No part is large, all together are."""
    parts = {f"p{i}": bytes(1_000_000) for i in range(90)}
    return zip_file(**{"word/document.xml": "<x/>", **parts})


LAUGHS = "<!DOCTYPE x [<!ENTITY a 'haha'>" + "".join(
    f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
) + "]>"  # fmt: skip


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (word_xml(paragraph("x" * 40_000_000)), "decompression_bomb"),
        (zip_file(**{"word/document.xml": "<x/>", "a": b"\0" * 300_000_000}), "decompression_bomb"),
        (many_entries(), "decompression_bomb"),
        (large_in_sum(), "decompression_bomb"),
        (zip_file(**{"word/document.xml": "<x/>", "../up": "x"}), "unsupported_content_type"),
        (zip_file(**{"word/document.xml": "<x/>", "/abs": "x"}), "unsupported_content_type"),
        (word_xml(paragraph("&i;"), LAUGHS), "unsupported_content_type"),
        (word_xml(paragraph("&f;"), "<!DOCTYPE x [<!ENTITY f SYSTEM 'file:///etc/passwd'>]>"),
         "unsupported_content_type"),
        (word_xml("<w:p>"), "unsupported_content_type"),
        (zip_file(**{"a.txt": "just a zip"}), "unsupported_content_type"),
    ],
    ids=["ratio", "size", "entries", "sum", "dots", "absolute", "laughs", "entity", "broken",
         "zip"],
)  # fmt: skip
def test_hostile_containers_are_refused(body: bytes, code: str) -> None:
    with pytest.raises(SearchFetchError) as caught:
        extract(body)
    assert caught.value.code == code


def test_text_boxes_are_read_once() -> None:
    mc = "http://schemas.openxmlformats.org/markup-compatibility/2006"
    box = f"<w:txbxContent>{paragraph('boxed')}</w:txbxContent>"
    body = (
        f'<w:p><w:r><w:t>outside</w:t><mc:AlternateContent xmlns:mc="{mc}"><mc:Choice>{box}'
        f"</mc:Choice><mc:Fallback>{box}</mc:Fallback></mc:AlternateContent></w:r></w:p>"
    )
    assert extract(word_xml(body)).content == "outside\n\nboxed\n"


def test_deleted_text_is_not_text_and_inserted_text_is() -> None:
    body = (
        "<w:p><w:del><w:r><w:delText>old</w:delText></w:r></w:del>"
        "<w:ins><w:r><w:t>new</w:t></w:r></w:ins></w:p>"
    )
    assert extract(word_xml(body)).content == "new\n"


def same(body: bytes) -> tuple[Extraction, Extraction]:
    return extract(body), extract(body)


@pytest.mark.parametrize("make", [lambda: pdf_bytes(paper()), word_file])
def test_documents_are_deterministic(make: Any) -> None:
    first, second = same(make())
    assert first == second


def test_pdf_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pypdfium2", None)
    with pytest.raises(ContentError, match=r"\[docs\]") as caught:
        extract(pdf_bytes(paper()))
    assert caught.value.code == "feature_unavailable"
