"""For pages too large to choose by a model: resiliparse's main-content heuristics, our writer.

What is invisible goes first, by the one filter of `hidden`; formulas and checkboxes are not looked
into, and metadata is read from the page's head alone.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

from lxml import html
from resiliparse.extract.html2text import extract_plain_text

from deepinfer_search_fetch.extract.dom import parse_html
from deepinfer_search_fetch.extract.hidden import remove_invisible
from deepinfer_search_fetch.extract.normalise import drop_gutters
from deepinfer_search_fetch.extract.tree import APART, PageTree, build_tree


@dataclass(frozen=True, slots=True)
class QuickPage:
    """page: all runs are content. head: <head> and the first <h1> for the metadata."""

    page: PageTree
    head: html.HtmlElement
    removed: int


def quick_page(text: str) -> QuickPage:
    """Main content of a page's source as the quick heuristics see it."""
    tree, _ = parse_html(text)
    if tree is None:
        return QuickPage(build_tree(html.Element("body")), html.Element("html"), 0)
    head = _head(tree)
    drop_gutters(tree)
    removed = sum(remove_invisible(tree).values())
    for span in tree.iter("span"):
        if APART in span.attrib:
            span.tag = "div"  # the heuristics know blocks by their tags
    reduced: str = extract_plain_text(
        str(html.tostring(tree, encoding="unicode")),
        preserve_formatting="minimal_html",
        main_content=True,
        links=True,
        alt_texts=False,
    )
    parsed, _ = parse_html(reduced)
    return QuickPage(build_tree(html.Element("body") if parsed is None else parsed), head, removed)


def _head(tree: html.HtmlElement) -> html.HtmlElement:
    """The page with its head and its first heading alone, before anything is taken out."""
    page = html.Element("html", {k: v for k, v in tree.attrib.items() if k in ("lang", "xml:lang")})
    found = tree.find("head")
    if found is not None:
        page.append(deepcopy(found))
    body = html.Element("body")
    page.append(body)
    heading = next(tree.iter("h1"), None)
    title = html.Element("h1")
    title.text = "" if heading is None else "".join(heading.itertext())
    body.append(title)
    return page
