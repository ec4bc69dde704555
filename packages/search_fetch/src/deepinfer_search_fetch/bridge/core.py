"""`Bridge.run_tool`: one use of a web tool, from the model's input to blocks for both sides."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from pydantic import ValidationError

from deepinfer_search_fetch.bridge import anthropic, openai
from deepinfer_search_fetch.bridge.citations import source_of
from deepinfer_search_fetch.bridge.known_urls import is_known, urls_in
from deepinfer_search_fetch.bridge.policy import Source, ToolOutcome, ToolPolicy
from deepinfer_search_fetch.bridge.render import (
    fenced,
    fetch_text,
    found_text,
    restored_text,
    search_text,
)
from deepinfer_search_fetch.bridge.sealed import Seal
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.json_values import as_list, as_object
from deepinfer_search_fetch.models import (
    FetchRequest,
    FetchResponse,
    SearchRequest,
    SearchResponse,
    SearchResult,
)

MAX_QUERY_CHARS = 512
MAX_URL_CHARS = 2048
MAX_PATTERN_CHARS = 256
MAX_INPUT_CHARS = 16_384
_WINDOWS = 10
_WINDOW_CHARS = 200
TOOLS = ("web_search", "web_fetch", "open_page", "find_in_page")


class Client(Protocol):
    """What the bridge needs: `AsyncSearchFetch` in process, `RemoteSearchFetch` over HTTP."""

    async def search(self, request: SearchRequest) -> SearchResponse: ...

    async def fetch(
        self,
        request: FetchRequest,
        *,
        allowed_domains: Sequence[str] = (),
        blocked_domains: Sequence[str] = (),
        network: bool = True,
    ) -> FetchResponse: ...


class Bridge:
    """Runs web tools for a chat server.

    secret: key of the tokens clients carry; None draws one, and tokens end with the process.
    audience: which server's clients they are for; another one with the same secret opens none.
    new_id, clock: replaceable, so that output can be reproduced.
    """

    def __init__(
        self,
        client: Client,
        *,
        secret: bytes | None = None,
        audience: str = "",
        new_id: Callable[[], str] = lambda: secrets.token_hex(12),
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        secret = secret or secrets.token_bytes(32)
        self.seal = Seal(secret, "result", audience)
        self.citation_seal = Seal(secret, "citation", audience)
        self._new_id = new_id
        self._clock = clock

    async def run_tool(
        self, name: str, input: Mapping[str, Any], policy: ToolPolicy
    ) -> ToolOutcome:
        """Run one tool use. Failures are outcomes with `is_error`, in the dialect's own form.

        name: "web_search" (input {"query"}), "web_fetch" or "open_page" (input {"url"}),
        "find_in_page" (input {"url", "pattern"}, plain text).
        Raises InvalidRequestError for an unknown tool name only.
        """
        if name not in TOOLS:
            raise InvalidRequestError(
                "invalid_argument", f"tool {name!r} is not one of {', '.join(TOOLS)}"
            )
        use = _Use(self, name, input, policy)
        if policy.max_uses is not None and policy.uses >= policy.max_uses:
            return use.failed("max_uses_exceeded")
        if sum(len(str(value)) for value in input.values()) > MAX_INPUT_CHARS:
            return use.failed("request_too_large" if name == "web_search" else "url_too_long")
        try:
            if name == "web_search":
                return await self._search(use)
            return await self._fetch(use)
        except SearchFetchError as error:
            return use.failed(anthropic.error_code(name, error))
        except ValidationError:
            return use.failed("invalid_tool_input")

    def result_text(self, block: Mapping[str, Any]) -> str:
        """What a `web_search_tool_result` of an earlier turn told the model.

        From the sealed contents where this server sealed them, whatever the client wrote beside
        them; a result that was changed or sealed elsewhere is left with title and address.
        """
        content = as_list(block.get("content"))
        if content is None:
            code = (as_object(block.get("content")) or {}).get("error_code")
            return f"The search failed: {code or 'no result'}."
        sources: list[Source] = []
        results = [r for item in content if (r := as_object(item)) is not None]
        for number, result in enumerate(results, 1):
            opened = self.seal.open(str(result.get("encrypted_content", "")))
            sources.append(source_of(opened or {**result, "text": "", "id": ""}, number))
        return restored_text(sources)

    async def _search(self, use: _Use) -> ToolOutcome:
        policy, query = use.policy, use.input.get("query")
        if not isinstance(query, str) or not query.strip():
            return use.failed("invalid_tool_input")
        if len(query) > MAX_QUERY_CHARS:
            return use.failed("query_too_long")
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
        sources = tuple(
            Source(number, r.id, r.url, r.title, _passage(r))
            for number, r in enumerate(response.results, policy.first_source)
        )
        if policy.dialect == "openai":
            shows = policy.include_sources
            wire = [openai.search_item(use.id, query, response, include_sources=shows)]
        else:
            wire = anthropic.search_blocks(use.id, query, response, self.seal)
        text = search_text(response, sources, citing=policy.citations)
        return ToolOutcome(
            blocks_for_model=[{"type": "text", "text": text}],
            wire_blocks=wire,
            usage={"web_search_requests": response.usage.quantity, "web_fetch_requests": 0},
            urls=frozenset(r.url for r in response.results),
            sources=sources,
        )

    async def _fetch(self, use: _Use) -> ToolOutcome:
        policy, url, pattern = use.policy, use.input.get("url"), use.input.get("pattern")
        if not isinstance(url, str) or not url:
            return use.failed("invalid_tool_input")
        if use.name == "find_in_page" and not (
            isinstance(pattern, str) and 0 < len(pattern) <= MAX_PATTERN_CHARS
        ):
            return use.failed("invalid_tool_input")
        if len(url) > MAX_URL_CHARS:
            return use.failed("url_too_long")
        if policy.known_urls is not None and not is_known(url, policy.known_urls):
            return use.failed("url_not_in_prior_context")
        whole = use.name == "find_in_page"
        response = await self._client.fetch(
            FetchRequest(
                url=url,
                max_tokens=None if whole else policy.max_tokens,
                mode="full" if whole else "article",
                max_age=policy.max_age,
            ),
            allowed_domains=policy.allowed_domains,
            blocked_domains=policy.blocked_domains,
            network=policy.network,
        )
        source = Source(
            policy.first_source,
            response.id,
            response.final_url,
            response.title or response.final_url,
            response.content,
        )
        if whole:
            text = found_text(url, str(pattern), _windows(response.content, str(pattern)))
        else:
            text = fetch_text(response, source, citing=policy.citations)
        return ToolOutcome(
            blocks_for_model=[{"type": "text", "text": text}],
            wire_blocks=use.page_blocks(response),
            usage={"web_search_requests": 0, "web_fetch_requests": response.usage.quantity},
            urls=frozenset({response.final_url}) | urls_in(response.content),
            sources=(source,),
        )

    def now(self) -> str:
        """RFC 3339, UTC, whole seconds."""
        return self._clock().isoformat(timespec="seconds").replace("+00:00", "Z")

    def new_id(self, policy: ToolPolicy) -> str:
        """The id of a tool use in its dialect."""
        prefix = "ws_" if policy.dialect == "openai" else "srvtoolu_"
        return policy.tool_use_id or prefix + self._new_id()


class _Use:
    """One tool use under way: its input, its id, and its blocks for the wire."""

    def __init__(
        self, bridge: Bridge, name: str, tool_input: Mapping[str, Any], policy: ToolPolicy
    ) -> None:
        self.name = name
        self.input = tool_input
        self.policy = policy
        self.id = bridge.new_id(policy)
        self._bridge = bridge

    def page_blocks(self, response: FetchResponse) -> list[dict[str, Any]]:
        url = str(self.input["url"])
        if self.policy.dialect == "anthropic":
            now = self._bridge.now()
            return anthropic.fetch_blocks(self.id, url, response, self.policy, now)
        return [self._openai_page_item(ok=True)]

    def failed(self, code: str) -> ToolOutcome:
        """The outcome of a use that did not succeed; `code` is Anthropic's name of the reason."""
        shown = {k: str(v) for k, v in self.input.items() if k in ("query", "url")}
        if self.policy.dialect == "anthropic":
            name = "web_search" if self.name == "web_search" else "web_fetch"
            wire = anthropic.error_blocks(self.id, name, shown, code)
        elif self.name == "web_search":
            query = shown.get("query", "")[:MAX_QUERY_CHARS]
            wire = [openai.search_item(self.id, query, None, include_sources=False)]
        else:
            wire = [self._openai_page_item(ok=False)]
        text = fenced("tool error", f"{self.name} failed: {code}")
        return ToolOutcome(
            blocks_for_model=[{"type": "text", "text": text}],
            wire_blocks=wire,
            usage={"web_search_requests": 0, "web_fetch_requests": 0},
            is_error=True,
        )

    def _openai_page_item(self, *, ok: bool) -> dict[str, Any]:
        url = str(self.input.get("url", ""))[:MAX_URL_CHARS]
        if self.name == "find_in_page":
            pattern = str(self.input.get("pattern", ""))[:MAX_PATTERN_CHARS]
            return openai.find_item(self.id, url, pattern, ok=ok)
        return openai.open_page_item(self.id, url, ok=ok)


def _passage(result: SearchResult) -> str:
    return result.content or result.summary or result.snippet


def _windows(content: str, pattern: str) -> list[str]:
    """The surroundings of each place of `pattern`, letters compared without case."""
    found: list[str] = []
    end = -1
    for match in re.finditer(re.escape(pattern), content, re.I):
        if match.start() < end:
            continue  # within the window before
        if len(found) == _WINDOWS:
            break
        end = match.end() + _WINDOW_CHARS
        found.append(content[max(0, match.start() - _WINDOW_CHARS) : end].strip())
    return found
