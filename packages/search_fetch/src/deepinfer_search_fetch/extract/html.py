"""The HTML pipeline: parse, normalise, drop the invisible, choose the content, write Markdown."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from cssselect import SelectorError
from lxml import html
from resiliparse.extract.html2text import extract_plain_text

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.extract import candidates, select
from deepinfer_search_fetch.extract.dom import parse_html
from deepinfer_search_fetch.extract.features import run_features
from deepinfer_search_fetch.extract.hidden import remove_invisible, strip_invisible_characters
from deepinfer_search_fetch.extract.inline import ImageMode, InlineWriter, WriterOptions
from deepinfer_search_fetch.extract.markdown import write_markdown
from deepinfer_search_fetch.extract.metadata import Metadata, read_metadata
from deepinfer_search_fetch.extract.normalise import normalise
from deepinfer_search_fetch.extract.tree import Box, PageTree, Run, build_tree
from deepinfer_search_fetch.models import Mode, PageType

_SAMPLE_CHARS = 6000
_COMMENTS = re.compile(r"\bcomments?\b|comment-|disqus|\brepl(?:y|ies)\b", re.I)


@dataclass(frozen=True, slots=True)
class HtmlOptions:
    """What the caller wants from one page; defaults are those of the Fetch API."""

    mode: Mode = "article"
    links: bool = True
    images: ImageMode = "alt"
    tables: bool = True
    comments: Literal["auto", "always", "never"] = "auto"
    selector: str | None = None
    exclude_selector: str | None = None
    page_marks: bool = False


@dataclass(frozen=True, slots=True)
class HtmlResult:
    """content: Markdown. links: (absolute URL, text) of the content, in order, without doubles."""

    content: str
    metadata: Metadata
    page_type: PageType
    quality: float
    links: list[tuple[str, str]]
    warnings: list[str] = field(default_factory=list)


def extract_html(text: str, url: urls.Url | None, options: HtmlOptions) -> HtmlResult:
    """Extract one page of HTML text; never raises for what a page contains.

    Raises InvalidRequestError only for a selector that is not valid CSS.
    """
    text = strip_invisible_characters(text)
    tree, warnings = parse_html(text)
    if tree is None:
        return HtmlResult("", Metadata(), "other", 0.0, [], warnings)
    if options.selector or options.exclude_selector:
        _scope(tree, options)
        text = str(html.tostring(tree, encoding="unicode"))
    normalise(tree)
    original = deepcopy(tree)
    removed = remove_invisible(tree)
    if removed:
        warnings.append(f"hidden_text_removed:{sum(removed.values())}")
    page = build_tree(tree)
    sample = " ".join(run.text for run in page.runs if len(run.text) > 40)[:_SAMPLE_CHARS]
    metadata = read_metadata(original, url, sample)
    warnings += metadata.warnings
    page_type: PageType = "other"
    quality = 0.0
    if options.mode == "article":
        page_type, quality = _select(page, original, text, metadata, options)
    elif options.mode == "fast":
        # From the cleaned tree: the quick extractor alone lets some hidden text through.
        page = _quick_page(str(html.tostring(tree, encoding="unicode")))
    writer_options = WriterOptions(
        _base(original, url), links=options.links, images=options.images, tables=options.tables
    )
    content = write_markdown(page, writer_options)
    return HtmlResult(
        content, metadata, page_type, quality, content_links(page, writer_options), warnings
    )


def _select(
    page: PageTree,
    original: html.HtmlElement,
    text: str,
    metadata: Metadata,
    options: HtmlOptions,
) -> tuple[PageType, float]:
    """Mark the content runs of `page`; returns the page type and the expected word F1."""
    if not page.runs:
        return "other", 0.0
    run_words = candidates.runs_words(page.runs)
    weights = np.array([len(w) for w in run_words], dtype=np.float64)
    vote_a = candidates.votes(run_words, candidates.trafilatura_text(original, fast=False))
    vote_b = candidates.votes(run_words, candidates.resiliparse_text(text))
    rows, page_row = run_features(
        page, run_words, vote_a, vote_b, metadata.title or "", metadata.type_flags
    )
    model = select.load_model()
    page_type, _ = model.page_type(np.array(page_row))
    probability = model.keep_probability(np.array(rows))
    kept = select.choose(probability, weights, page_type)
    if options.comments != "auto":
        in_comments = np.array([_in_comments(run) for run in page.runs])
        kept = kept | in_comments if options.comments == "always" else kept & ~in_comments
    select.apply(page, kept.tolist(), run_words)
    return page_type, select.expected_quality(probability, weights, kept)


def _in_comments(run: Run) -> bool:
    box: Box | None = run.box
    while box is not None and box.tag != "body":
        if _COMMENTS.search(f"{box.element.get('class') or ''} {box.element.get('id') or ''}"):
            return True
        box = box.parent
    return False


def _quick_page(text: str) -> PageTree:
    """The page as the quick extractor sees it: main content with its basic structure."""
    reduced = extract_plain_text(
        text, preserve_formatting="minimal_html", main_content=True, links=True, alt_texts=False
    )
    tree, _ = parse_html(reduced)
    return build_tree(html.Element("body") if tree is None else tree)


def _scope(tree: html.HtmlElement, options: HtmlOptions) -> None:
    """Reduce the body to what `selector` matches, without what `exclude_selector` matches."""
    body = tree.find(".//body")
    body = tree if body is None else body
    try:
        chosen = body.cssselect(options.selector) if options.selector else None
        excluded = body.cssselect(options.exclude_selector) if options.exclude_selector else []
    except (SelectorError, NotImplementedError) as error:
        raise InvalidRequestError(
            "invalid_argument", f"selector is not valid CSS: {error}"
        ) from None
    for element in excluded:
        if element.getparent() is not None and element is not body:
            element.drop_tree()
    if chosen is not None:
        outermost = [e for e in chosen if not any(a in chosen for a in e.iterancestors())]
        for child in list(body):
            body.remove(child)
        body.text = None
        for element in outermost:
            element.tail = None
            body.append(element)


def _base(tree: html.HtmlElement, url: urls.Url | None) -> urls.Url | None:
    """What links resolve against: <base href> if it is http(s), else the page's final URL."""
    element = tree.find(".//base[@href]")
    if element is None:
        return url
    href = element.get("href") or ""
    try:
        return urls.join(url, href) if url is not None else urls.parse(href)
    except SearchFetchError:
        return url


def content_links(page: PageTree, options: WriterOptions) -> list[tuple[str, str]]:
    """Absolute links of the kept runs with their text, first occurrence of each."""
    writer = InlineWriter(options)
    found: dict[str, str] = {}
    for run in page.runs:
        if not run.kept:
            continue
        for item in run.items:
            anchors = [] if isinstance(item, str) else list(item.iter("a"))
            for anchor in anchors:
                target = writer.resolve(anchor.get("href") or "")
                if target:
                    found.setdefault(target, " ".join("".join(anchor.itertext()).split()))
        box: Box | None = run.box
        while box is not None:
            if box.tag == "a" and (target := writer.resolve(box.element.get("href") or "")):
                found.setdefault(target, run.text)
            box = box.parent
    return list(found.items())
