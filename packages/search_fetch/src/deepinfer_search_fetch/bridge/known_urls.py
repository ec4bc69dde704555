"""Which URLs a conversation has named: only those may be fetched, or data could leave in a URL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.json_values import as_list, as_object

_URL_IN_TEXT = re.compile(r"https?://[^\s<>\"')\]}]{3,2000}")
_MAX_DEPTH = 8
_KINDS = ("all", "none", "only", "except")


def urls_in(text: str) -> frozenset[str]:
    """Every http(s) URL written in a text."""
    return frozenset(m.group().rstrip(".,;:!?") for m in _URL_IN_TEXT.finditer(text))


def is_known(url: str, known: Iterable[str]) -> bool:
    """Same URL up to spelling; a longer query string is another URL, or data could leave in it."""
    wanted = _spelled(url)
    return wanted is not None and any(_spelled(candidate) == wanted for candidate in known)


def known_urls(
    messages: Sequence[Mapping[str, Any]], url_sources: Mapping[str, Any] | None = None
) -> frozenset[str]:
    """URLs that the user, tools of the client and earlier web results brought into `messages`.

    messages: of a Messages or Chat body, or input items of Responses. What the model itself wrote
    does not count: a model that was talked into a URL must not be able to fetch it.
    url_sources: the field of the web_fetch tool that narrows this. Raises InvalidRequestError.
    """
    rule = _Rule(url_sources or {})
    names: dict[str, str] = {}
    found: set[str] = set()
    for message in messages:
        role = message.get("role")
        if role == "user":
            for block in _blocks(message.get("content")):
                found |= _of_user_block(block, rule, names)
        elif role == "assistant":
            for block in _blocks(message.get("content")):
                if block.get("type") in ("server_tool_use", "tool_use"):
                    names[str(block.get("id"))] = str(block.get("name"))
                elif str(block.get("type")).endswith("_tool_result"):
                    name = names.get(str(block.get("tool_use_id")), "")
                    found |= _texts(block) if rule.allows("server_tool_results", name) else set()
        elif role == "tool":
            name = names.get(str(message.get("tool_call_id")), "")
            found |= _texts(message) if rule.allows("client_tool_results", name) else set()
        elif message.get("type") in ("function_call_output", "custom_tool_call_output"):
            found |= _texts(message) if rule.allows("client_tool_results", "") else set()
        elif message.get("type") == "web_search_call":
            found |= _texts(message) if rule.allows("server_tool_results", "web_search") else set()
    return frozenset(found)


def _of_user_block(block: Mapping[str, Any], rule: _Rule, names: dict[str, str]) -> frozenset[str]:
    if block.get("type") == "tool_result":
        name = names.get(str(block.get("tool_use_id")), "")
        return _texts(block) if rule.allows("client_tool_results", name) else frozenset()
    return _texts(block) if rule.allows("user_input", "") else frozenset()


class _Rule:
    """`url_sources`: which kinds of content count, and of which tools."""

    def __init__(self, sources: Mapping[str, Any]) -> None:
        self._kinds: dict[str, tuple[str, frozenset[str]]] = {}
        for place, value in sources.items():
            variant = as_object(value) or {}
            if variant.get("type") not in _KINDS:
                raise InvalidRequestError(
                    "invalid_argument",
                    f"url_sources.{place}: expected a type of {', '.join(_KINDS)}",
                )
            tools = [as_object(tool) or {} for tool in as_list(variant.get("tools")) or ()]
            names = frozenset(str(tool.get("name")) for tool in tools)
            self._kinds[place] = (str(variant["type"]), names)

    def allows(self, place: str, tool: str) -> bool:
        kind, tools = self._kinds.get(place, ("all", frozenset[str]()))
        return (
            kind == "all"
            or (kind == "only" and tool in tools)
            or (kind == "except" and tool not in tools)
        )


def _blocks(content: object) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [o for block in as_list(content) or () if (o := as_object(block)) is not None]


def _texts(value: object, depth: int = 0) -> frozenset[str]:
    """URLs in every string below a JSON value."""
    if isinstance(value, str):
        return urls_in(value)
    if depth > _MAX_DEPTH:
        return frozenset()
    inner = as_object(value)
    items: Iterable[Any] = inner.values() if inner is not None else as_list(value) or ()
    return frozenset[str]().union(*(_texts(item, depth + 1) for item in items))


def _spelled(url: str) -> str | None:
    try:
        return str(urls.parse(url).without_fragment())
    except SearchFetchError:
        return None
