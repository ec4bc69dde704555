"""Books (EPUB): the chapters of the spine, one after the other, as HTML."""

from __future__ import annotations

import re
from urllib.parse import unquote

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.extract.package import MAX_TREE_BYTES, Package, local, resolve
from deepinfer_search_fetch.net.charset import decode_text

_BODY = re.compile(r"<body\b[^>]*>(.*)</body\s*>", re.I | re.S)


def epub_html(package: Package, limits: Limits) -> tuple[str, list[str]]:
    """The bodies of all chapters, up to 16 MiB; what lies beyond is left out with a warning."""
    out: list[str] = []
    warnings: list[str] = []
    size = 0
    for name in _chapters(package):
        text, _, _ = decode_text(package.read(name, MAX_TREE_BYTES))
        size += len(text)
        if size > MAX_TREE_BYTES:
            warnings.append("chapters_truncated")
            break
        body = _BODY.search(text)
        out.append(f"<section>{body.group(1) if body else text}</section>")
    return "".join(out), warnings


def _chapters(package: Package) -> list[str]:
    """Part names in reading order, by the first package document."""
    for part in package.opf_names():
        root = package.tree(part)
        if root is None:
            continue
        folder = part.rpartition("/")[0]
        items = {
            e.get("id", ""): resolve(folder, unquote(e.get("href", "")))
            for e in root.iter()
            if local(e) == "item"
        }
        spine = [e.get("idref", "") for e in root.iter() if local(e) == "itemref"]
        return [items[i] for i in spine if i in items and items[i] in package]
    return []
