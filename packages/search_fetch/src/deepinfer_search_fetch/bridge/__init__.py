"""Server-side web tools of the chat APIs, run on Search and Fetch. Knows nothing about models."""

from __future__ import annotations

from deepinfer_search_fetch.bridge.citations import Citation, cite
from deepinfer_search_fetch.bridge.core import Bridge
from deepinfer_search_fetch.bridge.known_urls import known_urls, urls_in
from deepinfer_search_fetch.bridge.policy import Source, ToolOutcome, ToolPolicy
from deepinfer_search_fetch.bridge.sealed import Seal
from deepinfer_search_fetch.bridge.session import Session

__all__ = [
    "Bridge",
    "Citation",
    "Seal",
    "Session",
    "Source",
    "ToolOutcome",
    "ToolPolicy",
    "cite",
    "known_urls",
    "urls_in",
]
