"""The HTML pipeline: parse, normalise, drop the invisible, choose the content, write Markdown."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

from cssselect import SelectorError
from lxml import html

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.extract import candidates, select
from deepinfer_search_fetch.extract.bounds import too_large
from deepinfer_search_fetch.extract.dom import bounded, parse_html
from deepinfer_search_fetch.extract.features import run_features
from deepinfer_search_fetch.extract.hidden import remove_invisible, strip_invisible_characters
from deepinfer_search_fetch.extract.inline import (
    ImageMode,
    InlineWriter,
    WriterOptions,
    image_source,
)
from deepinfer_search_fetch.extract.layout import Floats
from deepinfer_search_fetch.extract.markdown import write_markdown
from deepinfer_search_fetch.extract.metadata import Metadata, read_metadata
from deepinfer_search_fetch.extract.normalise import normalise
from deepinfer_search_fetch.extract.quick import quick_page
from deepinfer_search_fetch.extract.tree import Box, PageTree, build_tree
from deepinfer_search_fetch.models import Mode, PageType

_SAMPLE_CHARS = 6000
# Beyond this many "<" a choice takes seconds; heuristics do not.
_MAX_ARTICLE_MARKS = 30_000


@dataclass(frozen=True, slots=True)
class HtmlOptions:
    """What the caller wants from one page; defaults are those of the Fetch API."""

    mode: Mode = "article"
    links: bool = True
    images: ImageMode = "alt"
    tables: bool = True
    comments: select.Comments = "auto"
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
    images: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


@dataclass(frozen=True, slots=True)
class Prepared:
    """A page ready for the choice of content. tree: cleaned; original: before cleaning."""

    page: PageTree
    tree: html.HtmlElement
    original: html.HtmlElement
    text: str
    metadata: Metadata
    warnings: list[str]


def prepare(text: str, url: urls.Url | None, options: HtmlOptions) -> Prepared | None:
    """Parse, normalise, drop what is invisible, read the metadata; None for a page without any
    element. Raises InvalidRequestError for a selector that is not valid CSS."""
    text, warnings = bounded(strip_invisible_characters(text))
    tree, more = parse_html(text)
    if tree is None:
        return None
    warnings += more
    if options.selector or options.exclude_selector:
        _scope(tree, options)
        text = str(html.tostring(tree, encoding="unicode"))
    normalise(tree)
    original = deepcopy(tree)
    removed = remove_invisible(tree)
    if removed:
        warnings.append(f"hidden_text_removed:{sum(removed.values())}")
    page = build_tree(tree)
    metadata = read_metadata(original, url, _sample(page))
    return Prepared(page, tree, original, text, metadata, [*warnings, *metadata.warnings])


def run_inputs(
    prepared: Prepared, run_words: list[list[str]], *, quick: bool = False
) -> tuple[Floats, Floats]:
    """What the model decides by: see `features.run_features`. quick: with the quick voter alone."""
    votes = [
        candidates.votes(run_words, text)
        for text in candidates.voters(prepared.original, prepared.text, quick=quick)
    ]
    metadata = prepared.metadata
    return run_features(prepared.page, run_words, votes, metadata.title or "", metadata.type_flags)


def extract_html(text: str, url: urls.Url | None, options: HtmlOptions) -> HtmlResult:
    """Extract one page of HTML text; never raises for what a page contains.

    Raises InvalidRequestError only for a selector that is not valid CSS.
    """
    if options.mode != "full" and text.count("<") > _MAX_ARTICLE_MARKS:
        return _too_large(text, url, options)
    prepared = prepare(text, url, options)
    if prepared is None:
        return HtmlResult("", Metadata(), "other", 0.0, [], [])
    page = prepared.page
    page_type: PageType = "other"
    quality = 0.0
    if options.mode != "full":
        if too_large(prepared.original, page.runs):
            return _too_large(text, url, options)
        page_type, quality = _select(prepared, options)
    content, links = _write(page, _base(prepared.original, url), options)
    images = content_images(page, _base(prepared.original, url))
    return HtmlResult(
        content, prepared.metadata, page_type, quality, links, prepared.warnings, images
    )


def _too_large(text: str, url: urls.Url | None, options: HtmlOptions) -> HtmlResult:
    """The answer of heuristics alone where a choice by the model would take seconds."""
    result = _by_heuristics(text, url, options)
    if not result.content:  # to it a page that is all list or all links has no main content
        result = extract_html(text, url, replace(options, mode="full"))
    return replace(result, warnings=[*result.warnings, "too_large"])


def _by_heuristics(text: str, url: urls.Url | None, options: HtmlOptions) -> HtmlResult:
    text, limits = bounded(strip_invisible_characters(text))
    if options.selector or options.exclude_selector:
        tree, _ = parse_html(text)
        if tree is not None:
            _scope(tree, options)
            text = str(html.tostring(tree, encoding="unicode"))
    quick = quick_page(text)
    metadata = read_metadata(quick.head, url, _sample(quick.page))
    warnings = [*limits, f"hidden_text_removed:{quick.removed}"] if quick.removed else limits
    content, links = _write(quick.page, _base(quick.head, url), options)
    images = content_images(quick.page, _base(quick.head, url))
    return HtmlResult(
        content, metadata, "other", 0.0, links, [*warnings, *metadata.warnings], images
    )


def _write(
    page: PageTree, base: urls.Url | None, options: HtmlOptions
) -> tuple[str, list[tuple[str, str]]]:
    writer_options = WriterOptions(
        base, links=options.links, images=options.images, tables=options.tables
    )
    return write_markdown(page, writer_options), content_links(page, writer_options)


def _sample(page: PageTree) -> str:
    """Visible text for the language check."""
    return " ".join(run.text for run in page.runs if len(run.text) > 40)[:_SAMPLE_CHARS]


def _select(prepared: Prepared, options: HtmlOptions) -> tuple[PageType, float]:
    """Mark the content runs of the page; returns the page type and the expected word F1."""
    page = prepared.page
    if not page.runs:
        return "other", 0.0
    run_words = candidates.runs_words(page.runs)
    quick = options.mode == "fast"
    rows, page_row = run_inputs(prepared, run_words, quick=quick)
    model = select.load_model(quick=quick)
    return select.decide(model, page, run_words, rows, page_row, options.comments)


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


_NO_CONTENT = frozenset({"nav", "header", "footer", "aside"})
_MAX_IMAGES = 200


def content_images(page: PageTree, base: urls.Url | None) -> list[tuple[str, str]]:
    """(absolute URL, alternative text) of the pictures in the part of the page that holds what was
    kept, first occurrence of each; none of menus and margins."""
    kept = [run.box for run in page.runs if run.kept]
    if not kept:
        return []
    common = _path(kept[0])
    for box in kept[1:]:
        common = [a for a, b in zip(common, _path(box), strict=False) if a is b]
    writer = InlineWriter(WriterOptions(base))
    found: dict[str, str] = {}
    for image in (common[-1] if common else page.root).element.iter("img"):
        source = image_source(image)
        target = writer.resolve(source) if source else None
        if target is None or len(found) >= _MAX_IMAGES:
            continue
        if not any(a.tag in _NO_CONTENT for a in image.iterancestors()):
            found.setdefault(target, " ".join((image.get("alt") or "").split()))
    return list(found.items())


def _path(box: Box) -> list[Box]:
    """The boxes around a box, outermost first, itself last."""
    path: list[Box] = []
    current: Box | None = box
    while current is not None:
        path.append(current)
        current = current.parent
    return path[::-1]
