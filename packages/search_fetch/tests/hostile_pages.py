"""Pages made to hang or bloat an extractor, by name."""

from __future__ import annotations

import zlib

_TEXT = "Some words of a paragraph that says a thing "

HOSTILE = {
    "nested divs": "<div>" * 100_000 + "deep text" + "</div>" * 100_000,
    "nested inline": "<b>" * 50_000 + "text",
    "nested lists": "<ul><li>x" * 50_000,
    "long attribute": "<p title='" + "x" * 10_000_000 + "'>text</p>",
    "many attributes": "<p " + " ".join(f"a{i}=1" for i in range(300_000)) + ">text</p>",
    "attributes everywhere": ("<p " + " ".join(f"a{i}=1" for i in range(90)) + ">text") * 5000,
    "open quotes": "<a href='" * 20_000,
    "a million cells": "<table>" + ("<tr>" + "<td>x</td>" * 1000 + "</tr>") * 1000 + "</table>",
    "spanning cells": "<table>" + "<tr><td colspan=1000 rowspan=1000>x" * 5000,
    "spans in one row": "<table><tr>" + "<td colspan=1000 rowspan=1000>x" * 5000,
    "one wide row": "<table><tr>" + "<td>x" * 20_000 + "<tr><td>y" * 15_000,
    "just enough paragraphs": "".join(f"<p>{_TEXT}{i}" for i in range(3990)),
    "8,000 paragraphs": "".join(f"<p>{_TEXT}{i}</p>" for i in range(8000)),
    "20,000 paragraphs": "".join(f"<p>{_TEXT}{i}</p>" for i in range(20_000)),
    "line breaks": "<p>" + "line of text<br>" * 29_000,
    "list items": "<ul>" + "<li>item of text" * 29_000,
    "50,000 links": "<p>" + "".join(f"<a href=/p/{i}>l{i}</a> " for i in range(50_000)),
    "unicode links": "<p>" + "".join(f"<a href=//bü{i}.de/é>l</a> " for i in range(40_000)),
    "dots in links": "<p>" + f"<a href=/{'a/../' * 1500}>l</a> " * 1200,
    "inline siblings": "<p>" + "<span class=a>x</span>" * 250_000,
    "hidden parts": "<p hidden>some text" * 20_000,
    "hiding rules": f"<style>{'.a .b{display:none}' * 20_000}</style>" + "<p class='a b'>x" * 999,
    "ten megabytes of text": "<p>" + "word of text. " * 700_000,
    "lines of code": "<pre>" + "x\n" * 4_000_000,
    "marks to escape": "<p>" + "*_" * 4_000_000,
    "nested tables": "<table><tr><td>x" * 5000,
    "ampersands": "&" * 200_000,
}
CLASSIC = ["nested divs", "spanning cells"]


def zeros_packed(megabytes: int, window: int = 15) -> bytes:
    """The first bytes of a stream that unpacks to so many megabytes of zeros, at once.

    After a full flush a stream goes on as if it had just begun, so that its parts repeat. It has no
    end: who reads so far did not stop in time. window: 15 for zlib's head, 31 for that of gzip.
    """
    packer = zlib.compressobj(9, zlib.DEFLATED, window)
    first, again = (
        packer.compress(bytes(1_000_000)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2)
    )
    return first + again * (megabytes - 1)
