"""Rewrites of the tree before anything is dropped: math to TeX, checkboxes to text, no fittings.

Fittings are what a page adds to its text for the mouse: copy buttons, the pilcrow behind a heading,
the arrow behind a footnote.
"""

from __future__ import annotations

import re

from lxml import etree, html  # pyright: ignore[reportAttributeAccessIssue]

from deepinfer_search_fetch.extract.bounds import bound_spans
from deepinfer_search_fetch.extract.dom import small_number

MATH_TAG = "math-tex"
_TEX_SCRIPT = re.compile(r"^math/tex", re.I)
_DISPLAY_WRAPPER = re.compile(r"^\{\\(?:displaystyle|textstyle)\s*(.*)\}$", re.S)
_COPY = re.compile(r"(?:^|[\s_-])(?:copy|clipboard|copybtn|copybutton)(?:$|[\s_-])", re.I)
_COPY_WORDS = frozenset({"copy", "copy code", "copied", "copied!", "copy to clipboard"})
_ANCHOR_MARKS = frozenset({"", "#", "¶", "§", "🔗", "permalink", "anchor", "link"})
_BACK_CLASS = re.compile(r"footnote-?back|mw-cite-backlink|reversefootnote|backref", re.I)
_BACK_MARKS = frozenset({"↩", "↩︎", "^", "↑", "⏎", "↵"})
_GUTTER = re.compile(
    r"\b(?:line-?nos?|gutter|line-?numbers?|blob-num|ln-num|hljs-ln-numbers|ln-line|rouge-gutter"
    r"|code-lines?-?no)\b",
    re.I,
)
_TEX = re.compile(r"(?:^|[-/])(?:la)?tex(?:$|[\s;])")  # not text/plain
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_VISUAL = ("MathJax_Preview", "MathJax", "MathJax_Display", "MathJax_SVG", "MathJax_CHTML")


def normalise(tree: html.HtmlElement) -> None:
    """Replace every formula by one <math-tex data-display=0|1> holding TeX; mark task items."""
    _drop_fittings(tree)
    drop_gutters(tree)
    bound_spans(tree)
    _math_scripts(tree)
    _rendered_math(tree)
    _mathml(tree)
    for box in list(tree.iter("input")):
        if box.get("type") == "checkbox" and _first_in_item(box):
            mark = html.Element("span")
            mark.text = "[x] " if "checked" in box.attrib else "[ ] "
            mark.set("data-task", "1")
            parent = box.getparent()
            if parent is not None and parent.tag == "label":
                parent.tag = "span"  # the text of a task, not of a form
            _replace(box, mark)


def _drop_fittings(tree: html.HtmlElement) -> None:
    for button in list(tree.iter("button", "clipboard-copy")):
        label = f"{button.get('class') or ''} {button.get('id') or ''}"
        words = " ".join("".join(button.itertext()).split()).lower()
        if _COPY.search(label) or words in _COPY_WORDS:
            button.drop_tree()
    for heading in tree.iter(*_HEADINGS):
        for anchor in list(heading.iter("a")):
            if _leads_nowhere(anchor, _ANCHOR_MARKS) and anchor.get("href"):
                anchor.drop_tree()
    for anchor in list(tree.iter("a")):
        if _leads_nowhere(anchor, _BACK_MARKS) or (
            _BACK_CLASS.search(anchor.get("class") or "") and _in_page(anchor)
        ):
            anchor.drop_tree()


def drop_gutters(tree: html.HtmlElement) -> None:
    """Line numbers beside code, by the names of their elements or by what they count."""
    for element in list(tree.iter("td", "th", "div", "pre", "span", "code")):
        named = _GUTTER.search(f"{element.get('class') or ''} {element.get('id') or ''}")
        if element.getparent() is None or not (named or element.tag == "td"):
            continue
        numbers = "".join(element.itertext()).split()
        if not numbers or not all(n.isascii() and n.isdigit() for n in numbers):
            continue
        if named or (_beside_code(element) and _counts_up(numbers)):
            element.drop_tree()


def _beside_code(cell: html.HtmlElement) -> bool:
    following = cell.getnext()
    return following is not None and following.find(".//pre") is not None


def _counts_up(numbers: list[str]) -> bool:
    first = small_number(numbers[0], -1)
    return first >= 0 and all(small_number(n, -1) == first + i for i, n in enumerate(numbers))


def _in_page(anchor: html.HtmlElement) -> bool:
    return (anchor.get("href") or "#").startswith("#")


def _leads_nowhere(anchor: html.HtmlElement, marks: frozenset[str]) -> bool:
    """Whether a link inside the page shows no more than one of `marks`."""
    return _in_page(anchor) and "".join(anchor.itertext()).strip().lower() in marks


def _first_in_item(box: html.HtmlElement) -> bool:
    parent = box.getparent()
    if parent is not None and parent.tag in ("label", "p", "span"):
        box, parent = parent, parent.getparent()
    return parent is not None and parent.tag == "li" and parent.index(box) == 0


def _math_scripts(tree: html.HtmlElement) -> None:
    scripts = [s for s in tree.iter("script") if _TEX_SCRIPT.match(s.get("type") or "")]
    if not scripts:
        return
    for element in list(tree.iter("span", "div", "mjx-container")):
        classes = (element.get("class") or "").split()
        if element.getparent() is not None and any(c in _VISUAL for c in classes):
            element.drop_tree()
    for script in scripts:
        display = "mode=display" in (script.get("type") or "")
        _replace(script, _tex(script.text or "", display=display))


def _rendered_math(tree: html.HtmlElement) -> None:
    """KaTeX, and encyclopaedia formulas drawn as images: one annotation, many visual doubles."""
    for image in list(tree.iter("img")):
        classes = image.get("class") or ""
        if image.get("alt") and ("mwe-math" in classes or classes in ("tex", "latex", "math")):
            display = "display" in classes.replace("_", "-").split("-")
            if not any("mwe-math-element" in (a.get("class") or "") for a in image.iterancestors()):
                _replace(image, _tex(image.get("alt", ""), display=display))
    for element in list(tree.iter("span", "div", "mjx-container")):
        classes = (element.get("class") or "").split()
        if element.getparent() is None or not classes:
            continue
        if "katex" in classes or "katex-display" in classes or "mwe-math-element" in classes:
            tex = _annotation(element)
            image = element.find(".//img") if tex is None else None
            if image is not None:
                tex = image.get("alt")
            if tex:
                display = "katex-display" in classes or _is_display(element)
                _replace(element, _tex(tex, display=display))


def _mathml(tree: html.HtmlElement) -> None:
    for element in list(tree.iter("math")):
        tex = _annotation(element) or element.get("alttext")
        if tex is None:
            for annotation in list(element.iter("annotation", "annotation-xml")):
                annotation.drop_tree()
            tex = _linear(element)
        if tex.strip():
            _replace(element, _tex(tex, display=_is_display(element)))


def _annotation(element: html.HtmlElement) -> str | None:
    for annotation in element.iter("annotation"):
        if _TEX.search((annotation.get("encoding") or "").strip().lower()):
            return "".join(annotation.itertext())
    return None


def _is_display(element: html.HtmlElement) -> bool:
    nodes = [element, *element.iter("math", "img")]
    return any(
        n.get("display") == "block" or "display" in (n.get("class") or "").split("-") for n in nodes
    )


def _linear(element: html.HtmlElement) -> str:
    """MathML as TeX-like text: fractions, scripts and roots; everything else in order."""
    tag = etree.QName(element).localname if isinstance(element.tag, str) else ""
    parts = [_linear(child) for child in element]
    if tag == "mfrac" and len(parts) == 2:
        return f"\\frac{{{parts[0]}}}{{{parts[1]}}}"
    if tag == "msup" and len(parts) == 2:
        return f"{parts[0]}^{{{parts[1]}}}"
    if tag == "msub" and len(parts) == 2:
        return f"{parts[0]}_{{{parts[1]}}}"
    if tag == "msubsup" and len(parts) == 3:
        return f"{parts[0]}_{{{parts[1]}}}^{{{parts[2]}}}"
    if tag == "msqrt":
        return f"\\sqrt{{{''.join(parts)}}}"
    own = (element.text or "").strip()
    return own + "".join(parts)


def _tex(source: str, *, display: bool) -> html.HtmlElement:
    text = " ".join(source.split())
    wrapped = _DISPLAY_WRAPPER.match(text)
    element = html.Element(MATH_TAG)
    element.text = (wrapped.group(1) if wrapped else text).strip()
    element.set("data-display", "1" if display else "0")
    return element


def _replace(old: html.HtmlElement, new: html.HtmlElement) -> None:
    parent = old.getparent()
    if parent is None:
        return
    new.tail = old.tail
    parent.replace(old, new)
