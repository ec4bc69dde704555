"""The live document as flat HTML: shadow roots and same-origin frames become ordinary elements.

Reads the arrays of DOMSnapshot.captureSnapshot, which a page's scripts cannot tamper with and
which have no nesting limit. The browser has already put slotted children into their slots.
"""

from __future__ import annotations

import html
from typing import Any

MAX_NODES = 300_000
_ELEMENT, _TEXT, _DOCUMENT = 1, 3, 9
_VOID = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track",
     "wbr")
)  # fmt: skip
_RAW = frozenset({"script", "style"})
_DROPPED = frozenset({"noscript", "template", "audio", "video"})


def flatten(snapshot: dict[str, Any]) -> tuple[str, bool]:
    """HTML text of the main document, and whether it was cut at MAX_NODES nodes."""
    strings: list[str] = snapshot["strings"]
    documents = [_Document(d, strings) for d in snapshot["documents"]]
    out: list[str] = []
    left = MAX_NODES
    # Nodes still to write; a text is written as it is and closes a tag.
    stack: list[tuple[_Document, int] | str] = [(documents[0], n) for n in documents[0].roots]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            out.append(item)
            continue
        left -= 1
        if left < 0:
            continue
        document, node = item
        kind = document.kinds[node]
        inside = (document, document.children.get(node, []))
        if kind == _TEXT:
            out.append(document.text(node))
        elif kind == _ELEMENT:
            inside = _open(document, node, documents, out, stack)
        if kind in (_ELEMENT, _DOCUMENT):
            owner, children = inside
            stack.extend((owner, child) for child in reversed(children))
    return "<!DOCTYPE html>\n" + "".join(out), left < 0


def _open(
    document: _Document,
    node: int,
    documents: list[_Document],
    out: list[str],
    stack: list[tuple[_Document, int] | str],
) -> tuple[_Document, list[int]]:
    """Write the start tag, stack the end tag; returns what belongs between them."""
    name = document.name(node)
    children = document.children.get(node, [])
    if name == "slot":
        return document, children
    # The browser's own shadow trees (of inputs, details ...) hold no text of the page.
    if name in _DROPPED or node in document.built_in:
        return document, []
    if name in ("iframe", "frame"):
        inner = document.frames.get(node)
        if inner is None:
            return document, []
        out.append("<div>")
        stack.append("</div>")
        return documents[inner], documents[inner].body_children()
    attributes = "".join(f' {k}="{html.escape(v)}"' for k, v in document.attributes(node))
    out.append(f"<{name}{attributes}>")
    if name in _VOID:
        return document, []
    stack.append(f"</{name}>")
    return document, children


class _Document:
    """One document of the snapshot, its parallel arrays turned into lists of children."""

    def __init__(self, record: dict[str, Any], strings: list[str]) -> None:
        nodes = record["nodes"]
        self._strings = strings
        self.kinds: list[int] = nodes["nodeType"]
        self._names: list[int] = nodes["nodeName"]
        self._values: list[int] = nodes["nodeValue"]
        self._attributes: list[list[int]] = nodes["attributes"]
        self._parents: list[int] = nodes["parentIndex"]
        pseudo = set(nodes.get("pseudoType", {}).get("index", []))
        shadow = nodes.get("shadowRootType", {"index": [], "value": []})
        self.built_in = {
            node
            for node, kind in zip(shadow["index"], shadow["value"], strict=True)
            if strings[kind] == "user-agent"
        }
        frames = nodes.get("contentDocumentIndex", {"index": [], "value": []})
        self.frames: dict[int, int] = dict(zip(frames["index"], frames["value"], strict=True))
        self.children: dict[int, list[int]] = {}
        for node, parent in enumerate(self._parents):
            if node not in pseudo:
                self.children.setdefault(parent, []).append(node)
        self.roots = self.children.pop(-1, [])

    def name(self, node: int) -> str:
        return self._string(self._names[node]).lower()

    def attributes(self, node: int) -> list[tuple[str, str]]:
        flat = [self._string(i) for i in self._attributes[node]]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def text(self, node: int) -> str:
        value = self._string(self._values[node])
        parent = self._parents[node]
        return value if parent >= 0 and self.name(parent) in _RAW else html.escape(value, False)

    def body_children(self) -> list[int]:
        elements = (n for n, kind in enumerate(self.kinds) if kind == _ELEMENT)
        body = next((n for n in elements if self.name(n) == "body"), None)
        return [] if body is None else self.children.get(body, [])

    def _string(self, index: int) -> str:
        return self._strings[index] if index >= 0 else ""
