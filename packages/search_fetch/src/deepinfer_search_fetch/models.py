"""The wire contract: requests, responses, error body. OpenAPI is generated from these models."""

from __future__ import annotations

import re
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

PageType = Literal[
    "article", "forum", "product", "collection", "listing", "documentation", "service", "other"
]
Format = Literal["markdown", "text", "html", "outline", "links", "raw_text"]
Mode = Literal["article", "full", "fast"]
CharsetSource = Literal["bom", "header", "meta", "xml", "detected", "default"]


_DOMAIN = re.compile(r"[^\s/:?#@*]{1,253}")
MAX_BATCH = 50


def _domain(value: str) -> str:
    """`site`, `*.site`, `.site`, `https://site/` as the bare name; a path has no meaning here."""
    name = re.sub(r"^[a-z][a-z0-9+.-]*://", "", value.strip().lower())
    name = name.partition("/")[0] if name.endswith("/") and name.count("/") == 1 else name
    name = re.sub(r":\d+$", "", name.removeprefix("*.")).strip(".")
    if not _DOMAIN.fullmatch(name):
        raise ValueError(
            f"{value[:80]!r} is not a domain; write site.example, *.site.example"
            " or https://site.example/"
        )
    return name


Domain = Annotated[str, AfterValidator(_domain)]


def _period(value: str | None) -> str | None:
    """A freshness whose days exist and stand in order."""
    first, dots, last = (value or "").partition("..")
    if not dots:
        return value
    days: list[date] = []
    for text in (first, last):
        try:
            days.append(date.fromisoformat(text))
        except ValueError:
            raise ValueError(f"{text} is no day of the calendar") from None
    if days[0] > days[1]:
        raise ValueError(f"the period ends ({last}) before it begins ({first})")
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FetchRequest(_Strict):
    """One URL to read. Unknown fields are an error, so that a typing slip is seen."""

    url: str = Field(min_length=1, max_length=8192)
    format: Format = "markdown"
    mode: Mode = "article"
    max_tokens: int | None = Field(default=16_000, ge=1, le=200_000)
    offset: int = Field(default=0, ge=0)
    include_links: bool = True
    include_images: Literal["alt", "none", "url"] = "alt"
    include_tables: bool = True
    include_comments: Literal["auto", "always", "never"] = "auto"
    include_pages: bool = False
    selector: str | None = Field(default=None, max_length=512)
    exclude_selector: str | None = Field(default=None, max_length=512)
    max_age: int = Field(default=86_400, ge=0)
    store: bool = True
    render: Literal["auto", "never", "always"] = "auto"
    wait_for: str | int | None = None
    timeout: float = Field(default=30.0, ge=1, le=120)
    accept_language: str | None = Field(
        default=None, max_length=128, pattern=r"^[A-Za-z0-9*\-,;=. ]+$"
    )
    query: str | None = Field(default=None, max_length=512)
    # These narrow what the operator allows, for the URL and every redirect; nothing can widen it.
    allowed_domains: list[Domain] = Field(default_factory=list, max_length=100)
    blocked_domains: list[Domain] = Field(default_factory=list, max_length=100)
    return_links: bool = False
    return_images: bool = False
    cache_only: bool = False

    @field_validator("accept_language")
    @classmethod
    def _language_is_a_header_value(cls, value: str | None) -> str | None:
        return value.strip() or None if value is not None else None

    @field_validator("wait_for")
    @classmethod
    def _wait_is_bounded(cls, value: str | int | None) -> str | int | None:
        if isinstance(value, int) and not 0 <= value <= 10_000:
            raise ValueError("wait_for in milliseconds must be 0..10000")
        if isinstance(value, str) and len(value) > 512:
            raise ValueError("wait_for as a selector must be at most 512 characters")
        return value


class RedirectHop(_Strict):
    from_url: str = Field(serialization_alias="from", validation_alias="from")
    to_url: str = Field(serialization_alias="to", validation_alias="to")
    status: int

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class TokenWindow(_Strict):
    """Which part of the whole document `content` is, in tokens of `tokenizer`."""

    returned: int
    total: int
    offset: int
    next_offset: int | None
    tokenizer: str


class OutlineEntry(_Strict):
    level: int
    title: str
    token_offset: int


class Link(_Strict):
    url: str
    text: str


class Image(_Strict):
    url: str
    alt: str


class Highlight(_Strict):
    text: str
    score: float


class ExtractionInfo(_Strict):
    """How the content was made. `quality` is the model's expected share of right words, 0..1."""

    engine: str
    version: str
    rendered: bool = False
    quality: float
    warnings: list[str] = Field(default_factory=list)


class CacheInfo(_Strict):
    hit: bool
    stored_at: str | None = None
    age: int | None = None
    revalidated: bool = False
    etag: str | None = None
    expires: str | None = None


class RobotsInfo(_Strict):
    allowed: bool
    source: Literal["cache", "fetched", "absent", "ignored"]


class Usage(_Strict):
    billable: bool
    unit: Literal["fetch", "search"]
    quantity: int


class FetchResponse(_Strict):
    """One page, cleaned. Absent metadata is null, never an empty string."""

    id: str
    url: str
    final_url: str
    canonical_url: str | None
    favicon: str | None
    status: int
    redirects: list[RedirectHop]
    content_type: str
    charset: str
    charset_source: CharsetSource
    title: str | None
    author: str | None
    site_name: str | None
    language: str | None
    published: str | None
    modified: str | None
    description: str | None
    content: str
    format: Format
    page_type: PageType
    tokens: TokenWindow
    truncated: bool
    links: list[Link] | None = None
    images: list[Image] | None = None
    outline: list[OutlineEntry] | None = None
    highlights: list[Highlight] | None = None
    extraction: ExtractionInfo
    cache: CacheInfo
    robots: RobotsInfo
    usage: Usage
    elapsed_ms: int


class BatchRequest(_Strict):
    """Many pages: whole `requests`, or `urls` with defaults; one of the two.

    A page of a host that is busy waits for its turn.
    """

    requests: list[FetchRequest] = Field(default_factory=list, max_length=MAX_BATCH)
    urls: list[str] = Field(default_factory=list, max_length=MAX_BATCH)
    concurrency: int = Field(default=4, ge=1, le=8)
    fail_fast: bool = False

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if bool(self.requests) == bool(self.urls):
            raise ValueError("give either requests or urls")
        if self.urls:
            self.requests = [FetchRequest(url=url) for url in self.urls]
            self.urls = []
        return self


class BatchItem(_Strict):
    """What became of one request of a batch: `response` if `ok`, else `error`."""

    index: int
    ok: bool
    response: FetchResponse | None = None
    error: dict[str, Any] | None = None


class BatchResponse(_Strict):
    results: list[BatchItem]


class SearchRequest(_Strict):
    """A query with optional operators (site: -site: "…" -word lang: after: before: …).

    sources: "index" and names of configured upstream engines ("upstream:NAME"). question: the
    user's own words, read by the re-ranker only.
    """

    query: str = Field(min_length=1, max_length=512)
    count: int = Field(default=10, ge=1, le=50)
    offset: int = Field(default=0, ge=0, le=500)
    include_domains: list[Domain] = Field(default_factory=list, max_length=100)
    exclude_domains: list[Domain] = Field(default_factory=list, max_length=100)
    language: str | None = Field(default=None, pattern=r"^[a-z]{2,3}(-[A-Za-z0-9]+)*$")
    strict_language: bool = False
    freshness: Annotated[str | None, AfterValidator(_period)] = Field(
        default=None,
        pattern=r"^(day|week|month|year|\d{4}-\d{2}-\d{2}\.\.\d{4}-\d{2}-\d{2})$",
    )
    content: Literal["none", "summary", "full"] = "summary"
    max_tokens_per_result: int = Field(default=1000, ge=1, le=200_000)
    max_tokens: int = Field(default=8000, ge=1, le=200_000)
    min_relevance: float = Field(default=0.0, ge=0, le=1)
    min_authority: float = Field(default=0.0, ge=0, le=1)
    dedupe: bool = True
    max_per_host: int = Field(default=2, ge=1, le=50)
    diversity: float = Field(default=0.15, ge=0, le=1)
    expand: bool | None = None
    country: str | None = Field(default=None, pattern=r"^[A-Za-z]{2}$")
    rerank: Literal["none", "auto"] = "auto"
    sources: list[str] = Field(default_factory=lambda: ["index"], min_length=1, max_length=8)
    question: str | None = Field(default=None, max_length=2048)

    @field_validator("query")
    @classmethod
    def _query_is_not_blank(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("query must contain something besides blanks")
        return value


class Authority(_Strict):
    """Source authority by the open formula: score 0..1, tier -1..4, and what it rests on."""

    score: float
    tier: int
    basis: list[str]


class SearchResult(_Strict):
    """One hit. `highlights` are (start, end) in characters of `snippet`; `tokens` is the size of
    the page."""

    rank: int
    id: str
    url: str
    title: str
    site_name: str
    language: str | None
    published: str | None
    fetched_at: str
    snippet: str
    highlights: list[tuple[int, int]]
    summary: str
    content: str | None
    tokens: int
    relevance: float
    score: float
    freshness: float
    authority: Authority
    duplicates: int
    alternates: list[str]
    source: str


class SearchResponse(_Strict):
    """Hits, best first, of one generation of the index."""

    query: str
    results: list[SearchResult]
    total_estimate: int
    generation: int
    corrections: str | None
    warnings: list[str]
    unresponsive_engines: list[str] = Field(default_factory=list)
    usage: Usage
    elapsed_ms: int


class IngestReport(_Strict):
    """What one ingestion did; the counts add up to `seen`."""

    seen: int = 0
    indexed: int = 0
    updated: int = 0
    unchanged: int = 0
    duplicate: int = 0
    skipped: dict[str, int] = Field(default_factory=dict)
    failed: dict[str, int] = Field(default_factory=dict)
    generation: int = 0
