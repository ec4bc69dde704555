"""Web search on `deepinfer_search_fetch`: an index in this process, or a service over HTTP."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepinfer_engine.core.web_search import Dialect
from deepinfer_engine.errors import ConfigError, RequestError
from deepinfer_engine.settings import SEARCH_KEY_ENV, SEARCH_SECRET_ENV
from deepinfer_search_fetch import (
    AsyncSearchFetch,
    Bridge,
    Config,
    RemoteSearchFetch,
    SearchFetchError,
    Session,
    ToolOutcome,
    ToolPolicy,
)

log = logging.getLogger(__name__)

TOOL = "web_search"
_SECRET_BYTES = 32


class SearchFetchRun:
    """The uses of one answer; see `core.web_search.ToolRun`."""

    def __init__(self, bridge: Bridge, policy: ToolPolicy) -> None:
        # The codec has the client's limit on uses, and says no before it asks here.
        self._session = Session(bridge, {TOOL: replace(policy, max_uses=None)})

    async def run(
        self, name: str, input: Mapping[str, Any], use_id: str, max_tokens: int
    ) -> ToolOutcome:
        return await self._session.run(name, input, use_id, max_tokens=max_tokens)


class SearchFetchWeb:
    """See `core.web_search.WebSearch`."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def start(
        self, dialect: Dialect, declaration: Mapping[str, Any], include: Sequence[str]
    ) -> SearchFetchRun:
        try:
            if dialect == "anthropic":
                policy = ToolPolicy.from_anthropic(declaration)
            else:
                policy = ToolPolicy.from_openai(declaration, include=include)
        except SearchFetchError as exc:
            raise RequestError(f"the web search tool: {exc.message}", param="tools") from exc
        return SearchFetchRun(self._bridge, policy)

    def result_text(self, block: Mapping[str, Any]) -> str:
        return self._bridge.result_text(block)


@asynccontextmanager
async def open_search(
    where: str, home: Path | None, environ: Mapping[str, str]
) -> AsyncGenerator[SearchFetchWeb]:
    """The web search of a setting while the body runs.

    where: `embedded` or the URL of a service; home: the folder of the embedded index.
    Raises ConfigError.
    """
    if where == "embedded":
        config = Config() if home is None else Config(home=home)
        client: AsyncSearchFetch | RemoteSearchFetch = AsyncSearchFetch(config)
        secret = _secret(environ) or _kept_secret(config.home / "bridge.key")
    else:
        client = RemoteSearchFetch(where, environ.get(SEARCH_KEY_ENV) or None)
        secret = _secret(environ)
        if secret is None:
            log.info("%s is not set: sealed results end with this process", SEARCH_SECRET_ENV)
    async with client:
        yield SearchFetchWeb(Bridge(client, secret=secret, audience="deepinfer serve"))


def _secret(environ: Mapping[str, str]) -> bytes | None:
    text = environ.get(SEARCH_SECRET_ENV)
    if not text:
        return None
    if len(text) < 16:
        raise ConfigError(f"{SEARCH_SECRET_ENV} needs at least 16 characters, got {len(text)}")
    return text.encode()


def _kept_secret(file: Path) -> bytes:
    """The secret beside the index, made at the first start: sealed results outlive the process."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            found = file.read_bytes()
        else:
            with os.fdopen(handle, "wb") as out:
                found = secrets.token_bytes(_SECRET_BYTES)
                out.write(found)
    except OSError as exc:
        raise ConfigError(f"cannot use the search home {file.parent}: {exc.strerror}") from exc
    if len(found) < _SECRET_BYTES:
        raise ConfigError(f"{file} is damaged: {len(found)} bytes; remove it to make a new one")
    return found
