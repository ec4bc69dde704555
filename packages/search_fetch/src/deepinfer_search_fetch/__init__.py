"""Search and Fetch for agents: `fetch` a URL as clean Markdown, `search` an index of your own.

Names load on first use, so that importing the package costs nothing but this file.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from deepinfer_search_fetch.bridge import Bridge, Session, ToolOutcome, ToolPolicy, known_urls
    from deepinfer_search_fetch.client import AsyncSearchFetch, SearchFetch
    from deepinfer_search_fetch.config import Config, Limits
    from deepinfer_search_fetch.errors import (
        ContentError,
        InvalidRequestError,
        LimitError,
        RefusedError,
        SearchFetchError,
        UpstreamError,
    )
    from deepinfer_search_fetch.extract import Extraction, extract_markdown
    from deepinfer_search_fetch.index.sources.crawl import CrawlOptions
    from deepinfer_search_fetch.models import (
        Authority,
        BatchItem,
        FetchRequest,
        FetchResponse,
        IngestReport,
        SearchRequest,
        SearchResponse,
        SearchResult,
    )
    from deepinfer_search_fetch.remote import RemoteSearchFetch

_HOME = {
    "bridge": ("Bridge", "Session", "ToolOutcome", "ToolPolicy", "known_urls"),
    "client": ("AsyncSearchFetch", "SearchFetch"),
    "config": ("Config", "Limits"),
    "errors": (
        "ContentError",
        "InvalidRequestError",
        "LimitError",
        "RefusedError",
        "SearchFetchError",
        "UpstreamError",
    ),
    "extract": ("Extraction", "extract_markdown"),
    "index.sources.crawl": ("CrawlOptions",),
    "models": (
        "Authority",
        "BatchItem",
        "FetchRequest",
        "FetchResponse",
        "IngestReport",
        "SearchRequest",
        "SearchResponse",
        "SearchResult",
    ),
    "remote": ("RemoteSearchFetch",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AsyncSearchFetch",
    "Authority",
    "BatchItem",
    "Bridge",
    "Config",
    "ContentError",
    "CrawlOptions",
    "Extraction",
    "FetchRequest",
    "FetchResponse",
    "IngestReport",
    "InvalidRequestError",
    "LimitError",
    "Limits",
    "RefusedError",
    "RemoteSearchFetch",
    "SearchFetch",
    "SearchFetchError",
    "SearchRequest",
    "SearchResponse",
    "SearchResult",
    "Session",
    "ToolOutcome",
    "ToolPolicy",
    "UpstreamError",
    "extract_markdown",
    "known_urls",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
