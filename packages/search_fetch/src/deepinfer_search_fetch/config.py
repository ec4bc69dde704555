"""Operator settings. Nothing here can be widened by a request."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from deepinfer_search_fetch.address_rules import address_rules
from deepinfer_search_fetch.egress import EgressProxy

HOME_VARIABLE = "DEEPINFER_SEARCH_FETCH_HOME"
RENDER_USER_VARIABLE = "DEEPINFER_SEARCH_FETCH_RENDER_USER"
RENDER_SANDBOX_VARIABLE = "DEEPINFER_SEARCH_FETCH_RENDER_SANDBOX"


def default_home() -> Path:
    """Where index, cache and ledger live unless told otherwise."""
    configured = os.environ.get(HOME_VARIABLE)
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "search-fetch"


class Limits(BaseModel):
    """Size and time caps of one fetch (bytes and seconds)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    header_bytes: int = 64 * 1024
    wire_bytes: int = 10 * 1024 * 1024
    document_bytes: int = 50 * 1024 * 1024
    document_total_bytes: int = 256 * 1024 * 1024
    document_pages: int = 500
    document_entries: int = 2000
    decoded_bytes: int = 64 * 1024 * 1024
    decompression_ratio: int = 100
    ratio_grace_bytes: int = 1024 * 1024
    dns_seconds: float = 3.0
    connect_seconds: float = 5.0
    tls_seconds: float = 5.0
    first_byte_seconds: float = 15.0
    idle_seconds: float = 10.0
    min_bytes_per_second: int = 1024
    min_rate_grace_seconds: float = 5.0
    total_seconds: float = 30.0
    redirects: int = 10
    refresh_redirects: int = 3
    html_nodes: int = 300_000
    extract_cpu_seconds: float = 2.0
    extract_wall_seconds: float = 30.0
    extract_memory_bytes: int = 300 * 1024 * 1024


class Config(BaseModel):
    """Settings of one `SearchFetch` instance.

    allow_cidrs / allow_names / ports open what the guard denies by default (an intranet, a test
    site on loopback); deny_cidrs always wins over them.

    The renderer: chromium is the browser's path (None: searched on PATH), render_workers how many
    run at once (0: none), render_user the unprivileged account it runs as (needed when the service
    is root; also DEEPINFER_SEARCH_FETCH_RENDER_USER), render_sandbox=False (also
    DEEPINFER_SEARCH_FETCH_RENDER_SANDBOX=off) gives up the browser's own sandbox where the kernel
    offers none. render_seconds, render_bytes and render_memory_bytes bound one page.

    egress_proxy: `http://[user:password@]host:port`, through which every connection to a page
    goes; names are still resolved and vetted here, and the proxy is asked for the vetted address
    (CONNECT). Upstream engines are called without it.

    cache_bytes: pages on disk; document_cache_bytes: documents made of them, in memory.
    extract_workers: processes that read pages, one a core (0: in this process, without limits);
    search_threads: searches at once.

    index_fetched: pages that were fetched enter the index. searxng_url, brave_key: upstream search
    engines `upstream:searxng`, `upstream:brave`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Path = Field(default_factory=default_home)
    allow_cidrs: tuple[str, ...] = ()
    deny_cidrs: tuple[str, ...] = ()
    allow_names: tuple[str, ...] = ()
    ports: tuple[int, ...] = Field(default_factory=lambda: tuple(sorted(address_rules().ports)))
    allow_nat64: bool = False
    contact: str = "contact not configured by this operator"
    robots: Literal["respect", "respect_for_crawl_only", "ignore"] = "respect"
    host_requests_per_second: float = Field(default=1.0, gt=0)
    host_burst: int = Field(default=4, ge=1)
    host_connections: int = Field(default=2, ge=1)
    host_queue: int = Field(default=16, ge=0)
    cache_bytes: int = Field(default=512 * 1024 * 1024, ge=0)
    document_cache_bytes: int = Field(default=64 * 1024 * 1024, ge=0)
    extract_workers: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)), ge=0)
    search_threads: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)) + 1, ge=1)
    max_tokens: int = Field(default=200_000, ge=1)
    chromium: Path | None = None
    render_workers: int = Field(default=1, ge=0)
    render_user: str | None = Field(
        default_factory=lambda: os.environ.get(RENDER_USER_VARIABLE) or None
    )
    render_sandbox: bool = Field(
        default_factory=lambda: os.environ.get(RENDER_SANDBOX_VARIABLE) != "off"
    )
    render_seconds: float = Field(default=10.0, gt=0)
    render_bytes: int = Field(default=50 * 1024 * 1024, ge=1)
    render_memory_bytes: int = Field(default=1024 * 1024 * 1024, ge=1)
    limits: Limits = Limits()
    index_fetched: bool = False
    searxng_url: str | None = Field(default=None, pattern=r"^https?://")
    brave_key: SecretStr | None = None
    egress_proxy: SecretStr | None = None

    @field_validator("allow_cidrs", "deny_cidrs")
    @classmethod
    def _cidrs_parse(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for cidr in value:
            ipaddress.ip_network(cidr)
        return value

    @field_validator("egress_proxy")
    @classmethod
    def _proxy_parses(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            EgressProxy.parse(value.get_secret_value())
        return value

    @property
    def proxy(self) -> EgressProxy | None:
        """`egress_proxy`, taken apart."""
        text = self.egress_proxy
        return None if text is None else EgressProxy.parse(text.get_secret_value())

    @property
    def user_agent(self) -> str:
        """One honest identification; the product token is what robots.txt rules name."""
        from deepinfer_search_fetch import __version__

        return f"DeepInferFetch/{__version__} (+{self.contact})"
