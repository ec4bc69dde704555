"""Documents become text of the prompt; what is none, too large or hostile is a 400."""

from __future__ import annotations

import base64
import io
import subprocess
import zlib
from typing import Any

import pytest

from deepinfer_recipe import (
    ConversionOptions,
    DocumentLimits,
    Exchange,
    RecipeError,
    error_response,
)
from deepinfer_recipe.documents.reader import DocumentReader

pypdf = pytest.importorskip("pypdf", reason="install the extra `pdf`")
MODEL = "DeepSeek-V4.1-Flash"
PDF = "application/pdf"
LIMITS = DocumentLimits()


def body_of(protocol: str, data: str, media_type: str, title: str) -> dict[str, Any]:
    """A user turn with one document, in the way of each protocol's official clients."""
    url = f"data:{media_type};base64,{data}"
    if protocol == "chat":
        part: dict[str, Any] = {"type": "file", "file": {"filename": title, "file_data": url}}
    elif protocol == "responses":
        part = {"type": "input_file", "filename": title, "file_data": url}
        return {"model": MODEL, "input": [{"role": "user", "content": [part]}]}
    else:
        source = {"type": "base64", "media_type": media_type, "data": data}
        part = {"type": "document", "title": title, "source": source}
    return {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": [part]}]}


def prompt(
    protocol: Any,
    content: bytes,
    media_type: str,
    title: str = "notes",
    limits: DocumentLimits = LIMITS,
) -> str:
    body = body_of(protocol, base64.b64encode(content).decode(), media_type, title)
    options = ConversionOptions().with_document_limits(limits)
    return Exchange(protocol, body, id="x", options=options).prompt


def refusal(protocol: Any, *arguments: Any, **more: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        prompt(protocol, *arguments, **more)
    status, payload = error_response(protocol, caught.value)
    assert status == 400
    message = payload["error"]["message"]
    assert "content[0]" in message
    if protocol != "messages":
        assert payload["error"]["param"].endswith("content[0]")
    return message


def pdf(*pages: str) -> bytes:
    """A PDF that shows these lines, one a page."""
    writer = pypdf.PdfWriter()
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    for line in pages:
        page = writer.add_blank_page(200, 200)
        font = DictionaryObject(
            {
                NameObject("/Type"): NameObject("/Font"),
                NameObject("/Subtype"): NameObject("/Type1"),
                NameObject("/BaseFont"): NameObject("/Helvetica"),
            }
        )
        resources = DictionaryObject(
            {NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})}
        )
        page[NameObject("/Resources")] = resources
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 100 Td ({line}) Tj ET".encode())
        page[NameObject("/Contents")] = stream
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


EACH = pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])


@EACH
@pytest.mark.parametrize(
    "media_type", ["text/plain", "text/markdown; charset=utf-8", "application/json"]
)
def test_text_stands_between_fences_under_its_title(protocol: Any, media_type: str) -> None:
    if protocol != "messages":
        media_type = media_type.partition(";")[0]
    assert "notes\n```\n# Hé\n```" in prompt(protocol, "# Hé".encode(), media_type)


@EACH
def test_a_document_cannot_end_its_own_fence(protocol: Any) -> None:
    text = "```\nbefore\n````\nafter"
    assert f"notes\n`````\n{text}\n`````" in prompt(protocol, text.encode(), "text/plain")


@EACH
def test_the_text_of_a_pdf_is_read_page_by_page(protocol: Any) -> None:
    assert "notes\n```\nfirst\n\nsecond\n```" in prompt(protocol, pdf("first", "second"), PDF)


def test_the_name_tells_the_kind_where_the_type_does_not() -> None:
    data = base64.b64encode(pdf("hello")).decode()
    part = {"type": "input_file", "filename": "a.PDF", "file_data": data}
    body = {"model": MODEL, "input": [{"role": "user", "content": [part]}]}
    assert "a.PDF\n```\nhello\n```" in Exchange("responses", body, id="x").prompt


@EACH
@pytest.mark.parametrize(
    ("content", "media_type", "told"),
    [
        (b"\xff\xfe", "text/plain", "UTF-8"),
        (b"MZ", "application/x-msdownload", "application/x-msdownload"),
        (b"no pdf", PDF, "cannot read the PDF"),
        (pdf("x")[:60], PDF, "cannot read the PDF"),
        (pdf(""), PDF, "no text"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(
    protocol: Any, content: bytes, media_type: str, told: str
) -> None:
    assert told in refusal(protocol, content, media_type)


def test_limits_on_size_count_text_and_pages() -> None:
    small = DocumentLimits(max_bytes=4)
    assert "4 bytes" in refusal("chat", b"12345", "text/plain", limits=small)
    assert "2 characters" in refusal(
        "chat", b"123", "text/plain", limits=DocumentLimits(max_total_chars=2)
    )
    assert "has 2 pages" in refusal(
        "chat", pdf("a", "b"), PDF, limits=DocumentLimits(pdf_max_pages=1)
    )
    part = {"type": "input_file", "file_data": "data:text/plain,x"}
    body = {"model": MODEL, "input": [{"role": "user", "content": [part, part]}]}
    options = ConversionOptions().with_document_limits(DocumentLimits(max_documents=1))
    with pytest.raises(RecipeError, match="1 documents"):
        Exchange("responses", body, id="x", options=options)


def content_pdf(content: bytes) -> bytes:
    """A PDF of one page with these instructions, packed."""
    packed = zlib.compress(content, 9)
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R"
        b"/Resources<</Font<</F 5 0 R>>>>>>",
        b"<</Length %d/Filter/FlateDecode>>stream\n%b\nendstream" % (len(packed), packed),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, offsets = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, start=1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, text)
    xref = len(out)
    out += b"xref\n0 6\n0000000000 65535 f \n"
    out += b"".join(b"%010d 00000 n \n" % at for at in offsets)
    return out + b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % xref


def test_a_pdf_that_would_eat_memory_or_time_costs_its_limit_only() -> None:
    hostile = content_pdf(b"BT (" + b"a" * 80_000_000 + b") Tj ET")
    assert len(hostile) < 2_000_000
    limits = DocumentLimits(pdf_memory_bytes=200 * 2**20, pdf_timeout_s=20)
    assert "PDF" in refusal("chat", hostile, PDF, limits=limits)
    quick = DocumentLimits(pdf_timeout_s=0.01)
    assert "within 0.01 s" in refusal("chat", pdf("x"), PDF, limits=quick)


def test_a_cycle_of_pages_ends() -> None:
    cycle = pdf("x").replace(b"/Count 1", b"/Count 9")
    assert b"/Count 9" in cycle
    data = cycle.replace(b"/Type /Page\n", b"/Type /Pages\n/Kids [ 1 0 R ]\n/Count 1\n")
    assert "PDF" in refusal("chat", data, PDF, limits=DocumentLimits(pdf_timeout_s=5))


def test_parity_shows_the_placeholders_of_the_reference() -> None:
    for protocol, placeholder in [
        ("responses", "[Unsupported Document]"),
        ("messages", "[Unsupported document type: text/plain]"),
    ]:
        body = body_of(protocol, "eA==", "text/plain", "t")
        exchange = Exchange(protocol, body, id="x", profile="parity")  # type: ignore[arg-type]
        assert placeholder in exchange.prompt


def test_files_that_lie_elsewhere_are_refused() -> None:
    for part in ({"file_id": "f"}, {"file_url": "https://x.test/a.pdf"}, {"file_data": 3}):
        turn = {"role": "user", "content": [{"type": "input_file", **part}]}
        with pytest.raises(RecipeError, match=r"input\[0\].content\[0\]"):
            Exchange("responses", {"model": MODEL, "input": [turn]}, id="x")
    picture = {"file_data": "data:image/png;base64,x"}
    for file in ({"file_id": "f"}, 3, picture):
        turn = {"role": "user", "content": [{"type": "file", "file": file}]}
        with pytest.raises(RecipeError, match=r"messages\[0\].content\[0\]"):
            Exchange("chat", {"model": MODEL, "messages": [turn]}, id="x")


def test_what_a_small_pdf_unpacks_to_is_counted_before_it_is_read() -> None:
    hostile = content_pdf(b"BT /F 1 Tf (a) Tj ET\n" * 500_000)
    assert len(hostile) < 40_000
    assert "unpacked" in refusal("chat", hostile, PDF)


def test_the_pdfs_of_a_request_share_their_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: started.append(a) or real(*a, **k))
    slow = content_pdf(b"BT /F 1 Tf (a) Tj ET\n" * 300_000)
    limits = DocumentLimits(pdf_cpu_s=0.4)
    told = refusal("chat", slow, PDF, limits=limits)
    assert "0.4 s of processor time" in told
    reader = DocumentReader(limits)
    for place in ("a", "b"):
        with pytest.raises(RecipeError, match=f"{place}: the PDFs of a request"):
            reader.from_bytes(slow, PDF, None, place)
    # The second one of the same request was refused without a process.
    assert len(started) == 2


def test_documents_are_counted_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a PDF was read"))
    reader = DocumentReader(DocumentLimits(max_documents=0))
    with pytest.raises(RecipeError, match="may have 0 documents"):
        reader.from_bytes(pdf("x"), PDF, None, "here")
    reader = DocumentReader(DocumentLimits(max_total_bytes=10))
    with pytest.raises(RecipeError, match="may have 10 bytes"):
        reader.from_bytes(pdf("x"), PDF, None, "here")
