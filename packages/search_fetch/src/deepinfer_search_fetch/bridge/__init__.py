"""Server-side web tools of the chat APIs, run on Search and Fetch. Knows nothing about models."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.bridge import anthropic, openai
from deepinfer_search_fetch.bridge.policy import ToolOutcome, ToolPolicy
from deepinfer_search_fetch.bridge.render import fenced, fetch_text, search_text
from deepinfer_search_fetch.bridge.sealed import Seal
from deepinfer_search_fetch.client import AsyncSearchFetch
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.models import FetchRequest, SearchRequest

MAX_QUERY_CHARS = 512
MAX_URL_CHARS = 2048
_URL_IN_TEXT = re.compile(r"https?://[^\s<>\"')\]}]{3,2000}")

__all__ = ["Bridge", "Seal", "ToolOutcome", "ToolPolicy", "urls_in"]


def urls_in(text: str) -> frozenset[str]:
    """Every http(s) URL written in a text: what a user names may be fetched."""
    return frozenset(m.group().rstrip(".,;:!?") for m in _URL_IN_TEXT.finditer(text))


class Bridge:
    """Runs `web_search` and `web_fetch` for a chat server.

    secret: key of the tokens clients carry; None draws one, and tokens end with the process.
    new_id, clock: replaceable, so that output can be reproduced.
    """

    def __init__(
        self,
        client: AsyncSearchFetch,
        *,
        secret: bytes | None = None,
        new_id: Callable[[], str] = lambda: secrets.token_hex(12),
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self.seal = Seal(secret or secrets.token_bytes(32))
        self._new_id = new_id
        self._clock = clock

    async def run_tool(
        self, name: str, input: Mapping[str, Any], policy: ToolPolicy
    ) -> ToolOutcome:
        """Run one tool use. Failures are outcomes with `is_error`, in the dialect's own form.

        name: "web_search" (input {"query"}) or "web_fetch" (input {"url"}).
        Raises InvalidRequestError for an unknown tool name only.
        """
        if name not in ("web_search", "web_fetch"):
            raise InvalidRequestError(
                "invalid_argument", f"tool {name!r} is not web_search or web_fetch"
            )
        if policy.max_uses is not None and policy.uses >= policy.max_uses:
            return self._failed(name, input, policy, "max_uses_exceeded")
        try:
            if name == "web_search":
                return await self._search(input, policy)
            return await self._fetch(input, policy)
        except SearchFetchError as error:
            return self._failed(name, input, policy, anthropic.error_code(name, error))
        except ValidationError:
            return self._failed(name, input, policy, "invalid_tool_input")

    async def _search(self, tool_input: Mapping[str, Any], policy: ToolPolicy) -> ToolOutcome:
        query = tool_input.get("query")
        if not isinstance(query, str) or not query.strip():
            return self._failed("web_search", tool_input, policy, "invalid_tool_input")
        if len(query) > MAX_QUERY_CHARS:
            return self._failed("web_search", tool_input, policy, "query_too_long")
        response = await self._client.search(
            SearchRequest(
                query=query,
                count=policy.results,
                include_domains=list(policy.allowed_domains),
                exclude_domains=list(policy.blocked_domains),
                content="full",
                max_tokens=policy.max_tokens,
                max_tokens_per_result=max(1, policy.max_tokens // policy.results),
            )
        )
        if policy.dialect == "openai":
            wire = openai.search_items(
                f"ws_{self._new_id()}", query, response, include_sources=policy.include_sources
            )
        else:
            wire = anthropic.search_blocks(self._use_id(policy), query, response, self.seal)
        return ToolOutcome(
            blocks_for_model=[{"type": "text", "text": search_text(response)}],
            wire_blocks=wire,
            usage={"web_search_requests": int(bool(response.results)), "web_fetch_requests": 0},
            urls=frozenset(r.url for r in response.results),
        )

    async def _fetch(self, tool_input: Mapping[str, Any], policy: ToolPolicy) -> ToolOutcome:
        url = tool_input.get("url")
        if not isinstance(url, str):
            return self._failed("web_fetch", tool_input, policy, "invalid_tool_input")
        if len(url) > MAX_URL_CHARS:
            return self._failed("web_fetch", tool_input, policy, "url_too_long")
        if policy.known_urls is not None and not _is_known(url, policy.known_urls):
            return self._failed("web_fetch", tool_input, policy, "url_not_in_prior_context")
        response = await self._client.fetch(
            FetchRequest(url=url, max_tokens=policy.max_tokens, render="never"),
            allowed_domains=policy.allowed_domains,
            blocked_domains=policy.blocked_domains,
            network=policy.network,
        )
        if policy.dialect == "openai":
            wire = openai.open_page_items(f"ws_{self._new_id()}", url, ok=True)
        else:
            moment = self._clock().isoformat(timespec="seconds").replace("+00:00", "Z")
            wire = anthropic.fetch_blocks(self._use_id(policy), url, response, policy, moment)
        return ToolOutcome(
            blocks_for_model=[{"type": "text", "text": fetch_text(response)}],
            wire_blocks=wire,
            usage={"web_search_requests": 0, "web_fetch_requests": 1},
            urls=frozenset({response.final_url}) | urls_in(response.content),
        )

    def _failed(
        self, name: str, tool_input: Mapping[str, Any], policy: ToolPolicy, code: str
    ) -> ToolOutcome:
        shown = {k: v for k, v in tool_input.items() if k in ("query", "url")}
        if policy.dialect == "openai":
            item_id = f"ws_{self._new_id()}"
            wire = (
                openai.search_items(
                    item_id, str(shown.get("query", "")), None, include_sources=False
                )
                if name == "web_search"
                else openai.open_page_items(item_id, str(shown.get("url", "")), ok=False)
            )
        else:
            wire = anthropic.error_blocks(self._use_id(policy), name, shown, code)
        text = fenced("tool error", f"{name} failed: {code}")
        return ToolOutcome(
            blocks_for_model=[{"type": "text", "text": text}],
            wire_blocks=wire,
            usage={"web_search_requests": 0, "web_fetch_requests": 0},
            is_error=True,
        )

    def _use_id(self, policy: ToolPolicy) -> str:
        return policy.tool_use_id or f"srvtoolu_{self._new_id()}"


def _is_known(url: str, known: frozenset[str]) -> bool:
    """Same URL up to spelling; a longer query string is another URL, or data could leave in it."""
    try:
        wanted = str(urls.parse(url).without_fragment())
    except SearchFetchError:
        return False
    for candidate in known:
        try:
            if str(urls.parse(candidate).without_fragment()) == wanted:
                return True
        except SearchFetchError:
            continue
    return False
