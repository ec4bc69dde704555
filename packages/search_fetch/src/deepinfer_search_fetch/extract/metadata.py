"""Title, author, dates, language and the like; absent values are None, never ""."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, cast

from lxml import html
from resiliparse.parse.lang import detect_fast

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import SearchFetchError

MAX_JSON_LD = 512 * 1024
_EARLIEST_YEAR = 1995
_ARTICLE_TYPES = frozenset(
    {
        "article",
        "newsarticle",
        "blogposting",
        "report",
        "techarticle",
        "scholarlyarticle",
        "reportagenewsarticle",
        "analysisnewsarticle",
        "liveblogposting",
        "advertisercontentarticle",
    }
)
# Kinds of page that structured data names; a column of the models each.
TYPE_FLAGS: tuple[tuple[str, frozenset[str]], ...] = (
    ("article", _ARTICLE_TYPES),
    (
        "product",
        frozenset({"product", "productgroup", "offer", "aggregateoffer", "individualproduct"}),
    ),
    ("forum", frozenset({"discussionforumposting", "qapage", "question", "socialmediaposting"})),
    ("faq", frozenset({"faqpage", "howto"})),
    (
        "list",
        frozenset({"itemlist", "collectionpage", "searchresultspage", "offercatalog", "blog"}),
    ),
    ("service", frozenset({"service", "organization", "localbusiness", "professionalservice"})),
)
# JSON can name half a surrogate pair or a control character; neither is text.
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]")
_DATE_IN_URL = re.compile(
    r"/((?:19|20)\d\d)[/-](0?[1-9]|1[0-2])[/-](0?[1-9]|[12]\d|3[01])(?:/|-|$)"
)
_ISO_DATE = re.compile(
    r"^\s*((?:19|20)\d\d)-(\d{1,2})-(\d{1,2})"
    r"(?:[T ](\d{1,2}:\d{2}(?::\d{2})?)(?:\.\d+)?\s*(Z|[+-]\d{2}:?\d{2})?)?"
)


@dataclass(frozen=True, slots=True)
class Metadata:
    """What the page says about itself. Dates are RFC 3339 or a plain date without a zone."""

    title: str | None = None
    author: str | None = None
    site_name: str | None = None
    language: str | None = None
    published: str | None = None
    modified: str | None = None
    description: str | None = None
    canonical_url: str | None = None
    favicon: str | None = None
    noindex: bool = False
    noarchive: bool = False
    type_flags: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()


def read_metadata(
    tree: html.HtmlElement, url: urls.Url | None, sample: str, *, today: date | None = None
) -> Metadata:
    """Metadata of an uncleaned tree.

    sample: visible text, for the language check. today: dates after it are dropped; None keeps
    them (a clock would make the output depend on the day).
    """
    meta = _meta_tags(tree)
    objects = list(_json_ld(tree))
    main = _main_object(objects)
    warnings: list[str] = []
    site = _text(meta.get("og:site_name")) or _text(_name_of(main.get("publisher")))
    language, language_warning = _language(tree, meta, sample)
    warnings += language_warning
    published = _date(
        [
            main.get("datePublished"),
            meta.get("article:published_time"),
            meta.get("date"),
            meta.get("dc.date"),
            meta.get("pubdate"),
            meta.get("parsely-pub-date"),
            *_time_tags(tree),
            _url_date(url),
        ],
        today,
    )
    modified = _date(
        [main.get("dateModified"), meta.get("article:modified_time"), meta.get("og:updated_time")],
        today,
    )
    if published and modified and modified[:10] < published[:10]:
        modified = None
    robots = f"{meta.get('robots', '')},{meta.get('deepinferfetch', '')}".lower()
    return Metadata(
        title=_title(tree, meta, main, site),
        author=_author(tree, meta, main),
        site_name=site or (url.host.removeprefix("www.") if url else None),
        language=language,
        published=published,
        modified=modified,
        description=_text(meta.get("og:description") or meta.get("description")),
        canonical_url=_canonical(tree, url),
        favicon=_favicon(tree, url),
        noindex="noindex" in robots or "none" in robots.split(","),
        noarchive="noarchive" in robots,
        type_flags=_type_flags(objects, meta),
        warnings=tuple(warnings),
    )


def _favicon(tree: html.HtmlElement, url: urls.Url | None) -> str | None:
    """The icon the page names; none is made up."""
    for link in tree.iter("link"):
        if url is not None and "icon" in (link.get("rel") or "").lower().split():
            try:
                return str(urls.join(url, link.get("href") or ""))
            except SearchFetchError:
                continue
    return None


def _meta_tags(tree: html.HtmlElement) -> dict[str, str]:
    found: dict[str, str] = {}
    for tag in tree.iter("meta"):
        name = tag.get("property") or tag.get("name") or tag.get("itemprop")
        content = tag.get("content")
        if name and content and content.strip():
            found.setdefault(name.strip().lower(), content.strip())
    return found


def _json_ld(tree: html.HtmlElement) -> Iterator[dict[str, Any]]:
    """Every object of every JSON-LD block, graphs and lists unfolded."""
    for script in tree.iter("script"):
        if (script.get("type") or "").strip().lower() != "application/ld+json":
            continue
        try:
            data: Any = json.loads((script.text or "")[:MAX_JSON_LD], strict=False)
        except (ValueError, RecursionError):
            continue
        queue: list[Any] = [data]
        while queue:
            item = queue.pop(0)
            if isinstance(item, list):
                queue = [*cast(list[Any], item), *queue]
            elif isinstance(item, dict):
                entry = cast(dict[str, Any], item)
                yield entry
                if isinstance(entry.get("@graph"), list):
                    queue = [*entry["@graph"], *queue]
                if isinstance(entry.get("mainEntity"), dict):
                    queue.insert(0, entry["mainEntity"])


def _types(entry: dict[str, Any]) -> set[str]:
    value = entry.get("@type")
    values: list[Any] = cast(list[Any], value) if isinstance(value, list) else [value]
    return {v.rpartition("/")[2].lower() for v in values if isinstance(v, str)}


def _main_object(objects: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = _ARTICLE_TYPES | TYPE_FLAGS[1][1] | TYPE_FLAGS[2][1]
    for entry in objects:
        if _types(entry) & wanted:
            return entry
    return next((e for e in objects if _types(e) & {"webpage", "faqpage"}), {})


def _type_flags(objects: list[dict[str, Any]], meta: dict[str, str]) -> tuple[float, ...]:
    present = set[str]().union(*(_types(e) for e in objects))
    og = meta.get("og:type", "").lower()
    flags = [float(bool(present & names)) for _, names in TYPE_FLAGS]
    return (*flags, float("article" in og), float("product" in og), float(og == "website"))


def _title(
    tree: html.HtmlElement, meta: dict[str, str], main: dict[str, Any], site: str | None
) -> str | None:
    headings = [_text("".join(h.itertext())) for h in tree.iter("h1")]
    heading = next((h for h in headings if h), None)
    document = _text(tree.findtext(".//title"))
    for raw in (main.get("headline"), meta.get("og:title"), meta.get("twitter:title")):
        title = _text(raw)
        if title:
            return _without_site(title, site)
    if heading and document and heading.lower() in document.lower():
        return heading
    return _without_site(document, site) if document else heading


def _without_site(title: str, site: str | None) -> str:
    """Drop a trailing " | Site" where it is the site's own name."""
    for separator in (" | ", " - ", " – ", " — ", " :: ", " · ", " » "):  # noqa: RUF001
        head, found, tail = title.rpartition(separator)
        if found and head and site and tail.strip().lower() == site.strip().lower():
            return head.strip()
    return title


def _author(tree: html.HtmlElement, meta: dict[str, str], main: dict[str, Any]) -> str | None:
    author = main.get("author")
    people: list[Any] = cast(list[Any], author) if isinstance(author, list) else [author]
    names = [n for n in (_text(_name_of(p)) for p in people) if n]
    if names:
        return ", ".join(dict.fromkeys(names))
    for key in ("author", "article:author", "dc.creator", "parsely-author", "sailthru.author"):
        value = _text(meta.get(key))
        if value and not value.startswith("http"):
            return value
    for element in tree.iter("a", "span"):
        if "author" in (element.get("rel") or "", element.get("itemprop") or ""):
            name = _text("".join(element.itertext()))
            if name and len(name) <= 80:
                return name
    return None


def _name_of(value: Any) -> Any:
    return cast(dict[str, Any], value).get("name") if isinstance(value, dict) else value


def _text(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    text = " ".join(_NO_TEXT.sub("", value).split())
    return text[:1000] or None


def _time_tags(tree: html.HtmlElement) -> list[str | None]:
    return [t.get("datetime") for t in list(tree.iter("time"))[:3]]


def _url_date(url: urls.Url | None) -> str | None:
    match = _DATE_IN_URL.search(url.path) if url else None
    return f"{match.group(1)}-{int(match.group(2)):02}-{int(match.group(3)):02}" if match else None


def _date(candidates: list[Any], today: date | None) -> str | None:
    """The first plausible date: RFC 3339, or the day alone where the zone is unknown."""
    for candidate in candidates:
        match = _ISO_DATE.match(candidate) if isinstance(candidate, str) else None
        if match is None:
            continue
        year, month, day, clock, zone = match.groups()
        try:
            found = date(int(year), int(month), int(day))
        except ValueError:
            continue
        if found.year < _EARLIEST_YEAR or (today is not None and found > today):
            continue
        if not clock or not zone:
            return found.isoformat()
        clock = clock.zfill(len(clock) + clock.index(":") % 2)
        clock = clock if clock.count(":") == 2 else clock + ":00"
        zone = zone if zone == "Z" or ":" in zone else f"{zone[:3]}:{zone[3:]}"
        text = f"{found.isoformat()}T{clock}{zone}"
        try:
            datetime.fromisoformat(text)
        except ValueError:
            return found.isoformat()
        return text
    return None


def _language(
    tree: html.HtmlElement, meta: dict[str, str], sample: str
) -> tuple[str | None, list[str]]:
    """The declared language checked against the text; the detector wins a disagreement."""
    declared = tree.get("lang") or meta.get("og:locale") or meta.get("content-language") or ""
    match = re.match(r"[A-Za-z]{2,3}\b", declared.replace("_", "-").strip())
    claimed = match.group().lower() if match else None
    if len(sample) < 200:
        return claimed, []
    detected, distance = detect_fast(sample[:4000])
    if detected in ("unknown", "") or distance > 1200:
        return claimed, []
    if claimed and claimed != detected:
        if distance > 800:
            return claimed, []
        return detected, ["language_mismatch"]
    return detected, []


def _canonical(tree: html.HtmlElement, url: urls.Url | None) -> str | None:
    """rel=canonical, if it stays on the same registrable domain."""
    for link in tree.iter("link"):
        if "canonical" not in (link.get("rel") or "").lower().split():
            continue
        href = link.get("href") or ""
        try:
            target = urls.join(url, href) if url else urls.parse(href)
        except SearchFetchError:
            return None
        same = url is None or urls.registrable_domain(url.host) == urls.registrable_domain(
            target.host
        )
        return str(target.without_fragment()) if same else None
    return None
