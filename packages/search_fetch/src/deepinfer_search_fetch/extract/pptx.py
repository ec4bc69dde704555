"""Slides (PresentationML) as HTML: one section a slide, in the order of the show."""

from __future__ import annotations

from html import escape
from typing import Any

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.extract.dom import small_number
from deepinfer_search_fetch.extract.package import Package, attribute, local

_MAIN = "ppt/presentation.xml"
_MAX_DEPTH = 20


def pptx_html(package: Package, limits: Limits) -> tuple[str, list[str]]:
    """Titles as headings, body text as lists, tables; hidden slides are left out."""
    root = package.tree(_MAIN)
    targets = package.relations(_MAIN)
    order = [e for e in root.iter() if local(e) == "sldId"] if root is not None else []
    out: list[str] = []
    hidden = 0
    for entry in order[: limits.document_pages]:
        identifier = next((v for k, v in entry.attrib.items() if k.endswith("}id")), "")
        slide = package.tree(targets.get(identifier, ("", False))[0])
        if slide is None:
            continue
        if slide.get("show") in ("0", "false"):
            hidden += 1
            continue
        out += [part for shape in slide.iter() if (part := _shape(shape))]
    warnings = [f"hidden_text_removed:{hidden}"] if hidden else []
    if len(order) > limits.document_pages:
        warnings.append(f"pages_truncated:{len(order)}")
    return "".join(out), warnings


def _shape(element: Any) -> str:
    kind = local(element)
    if kind == "sp":
        return _text_shape(element)
    if kind == "tbl":
        rows = [
            "".join(
                f"<td>{'<br>'.join(filter(None, map(_text, _all(c, 'p'))))}</td>"
                for c in _all(row, "tc")
            )
            for row in _all(element, "tr")
        ]
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
    return ""


def _text_shape(shape: Any) -> str:
    if any(e.get("hidden") in ("1", "true") for e in _all(shape, "cNvPr")):
        return ""
    holder = next(iter(_all(shape, "ph")), None)
    role = "" if holder is None else holder.get("type", "body")
    if role in ("dt", "ftr", "sldNum", "hdr"):
        return ""
    paragraphs = [(p, text) for p in _all(shape, "p") if (text := _text(p))]
    if role in ("title", "ctrTitle"):
        return f"<h2>{' '.join(text for _, text in paragraphs)}</h2>" if paragraphs else ""
    if role != "body" or len(paragraphs) < 2:
        return "".join(f"<p>{text}</p>" for _, text in paragraphs)
    out: list[str] = []
    depth = -1
    for paragraph, text in paragraphs:
        properties = next(iter(_all(paragraph, "pPr")), None)
        level = attribute(properties, "lvl") if properties is not None else None
        wanted = min(small_number(level, 0), _MAX_DEPTH)
        out.append("<ul>" * (wanted - depth) + "</ul>" * (depth - wanted) + f"<li>{text}</li>")
        depth = wanted
    return "".join(out) + "</ul>" * (depth + 1)


def _text(paragraph: Any) -> str:
    pieces: list[str] = []
    for element in paragraph.iter():
        kind = local(element)
        if kind == "t":
            pieces.append(escape(element.text or "", quote=False))
        elif kind == "br":
            pieces.append("<br>")
    return "".join(pieces).strip()


def _all(element: Any, name: str) -> list[Any]:
    return [e for e in element.iter() if local(e) == name and e is not element]
