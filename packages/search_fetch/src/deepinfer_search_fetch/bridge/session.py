"""One answer of a chat server: how often each tool ran, what may be fetched, what can be cited."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from deepinfer_search_fetch.bridge.citations import anthropic_blocks, openai_annotations
from deepinfer_search_fetch.bridge.core import Bridge
from deepinfer_search_fetch.bridge.policy import Source, ToolOutcome, ToolPolicy
from deepinfer_search_fetch.errors import InvalidRequestError

DEFAULT_MAX_ROUNDS = 10


class Session:
    """Runs the tool uses of one answer and keeps their counts.

    policies: one a tool name, as `ToolPolicy.from_anthropic` and `from_openai` make them.
    known_urls: of the conversation so far (`known_urls(messages)`); None switches the check off.
    max_rounds: tool uses after which `paused` turns true: end the answer with `pause_turn` and
        let the client continue it.
    """

    def __init__(
        self,
        bridge: Bridge,
        policies: Mapping[str, ToolPolicy],
        *,
        known_urls: frozenset[str] | None = None,
        max_rounds: int = DEFAULT_MAX_ROUNDS,
    ) -> None:
        self._bridge = bridge
        self._policies = dict(policies)
        self._max_rounds = max_rounds
        self._uses: dict[str, int] = {}
        self.known_urls = known_urls
        self.sources: list[Source] = []
        self.usage = {"web_search_requests": 0, "web_fetch_requests": 0}

    @property
    def paused(self) -> bool:
        """Whether this answer has had its share of tool uses."""
        return sum(self._uses.values()) >= self._max_rounds

    async def run(
        self,
        name: str,
        input: Mapping[str, Any],
        tool_use_id: str | None = None,
        *,
        max_tokens: int | None = None,
    ) -> ToolOutcome:
        """One tool use. Raises InvalidRequestError for a tool without a policy.

        max_tokens: what is left for the result, where that is less than the policy gives.
        """
        policy = self._policies.get(name)
        if policy is None:
            raise InvalidRequestError(
                "invalid_argument", f"tool {name!r} was not declared in this request"
            )
        uses = self._uses.get(name, 0)
        outcome = await self._bridge.run_tool(
            name,
            input,
            dataclasses.replace(
                policy,
                max_tokens=min(policy.max_tokens, max_tokens or policy.max_tokens),
                uses=uses,
                known_urls=self.known_urls,
                tool_use_id=tool_use_id,
                first_source=len(self.sources) + 1,
            ),
        )
        self._uses[name] = uses + 1
        if self.known_urls is not None:
            self.known_urls |= outcome.urls
        self.sources.extend(outcome.sources)
        for counter, count in outcome.usage.items():
            self.usage[counter] += count
        return outcome

    def text_blocks(self, text: str) -> list[dict[str, Any]]:
        """The answer's text as Messages blocks with citations of this session's sources."""
        return anthropic_blocks(text, self.sources, self._bridge.citation_seal)

    def annotations(self, text: str) -> list[dict[str, Any]]:
        """The answer's text's url_citations for Responses and Chat."""
        return openai_annotations(text, self.sources)
