"""Calls of server tools, kept apart from those the client answers.

One model turn may hold calls of both kinds. `TurnGenerator` stands between the parser and a
protocol's generator for one turn: it hands on everything but the server's calls, and remembers
what the model said, so that the next prompt can continue from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_recipe.conversation.inference import InferenceFinishReason, PromptUsage
from deepinfer_recipe.conversation.messages import AssistantMessage
from deepinfer_recipe.conversation.server_tools import ServerTool
from deepinfer_recipe.conversation.tool_types import ToolCall
from deepinfer_recipe.protocols.common.generator import ChunkGenerator, Ending


@dataclass(frozen=True, slots=True)
class ServerCall:
    """A call that waits for the server: run it and hand its result to the model."""

    id: str
    name: str
    arguments: str

    @property
    def input(self) -> dict[str, Any]:
        """The arguments as an object; empty if they are none."""
        try:
            value = json.loads(self.arguments)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(slots=True)
class Spent:
    """Usage of the turns before, and of the tools that ran."""

    prompt: PromptUsage
    completion_tokens: int
    reasoning_tokens: int | None
    tools: dict[str, int]


class TurnGenerator(ChunkGenerator[Any]):
    """The generator of one turn in front of the answer's. Made anew for every turn."""

    __slots__ = (
        "_arguments",
        "_client_calls",
        "_content",
        "_current",
        "_inner",
        "_new_id",
        "_reasoning",
        "_spent",
        "_tools",
        "calls",
        "ending",
    )

    def __init__(
        self,
        inner: ChunkGenerator[Any],
        tools: Mapping[str, ServerTool],
        new_id: Callable[[], str],
        spent: Spent | None = None,
    ) -> None:
        self._inner = inner
        self._tools = tools
        self._new_id = new_id
        self._spent = spent
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._arguments: list[str] = []
        self._current: str | None = None
        self._client_calls = 0
        self.calls: list[ServerCall] = []
        """The server's calls of this turn."""
        self.ending: Ending | None = None
        """How the turn ended, while the answer waits for the server's calls."""
        super().__init__(None)

    def _answer(self) -> ChunkGenerator[Any]:
        """The answer's generator, its events going where those of this turn go."""
        inner = self._inner
        inner.out = self.out
        return inner

    @property
    def calls_client(self) -> bool:
        """Whether the turn also calls tools that the client answers."""
        return self._client_calls > 0

    def message(self) -> AssistantMessage:
        """What the model said in this turn."""
        calls = [ToolCall(call.id, call.name, call.arguments) for call in self.calls]
        return AssistantMessage("".join(self._content), "".join(self._reasoning), calls or None)

    def start(self, usage: PromptUsage, fingerprint: str | None) -> None:
        if self._spent is None:
            self._answer().start(usage, fingerprint)
            return
        before = self._spent.prompt
        self._inner.prompt_usage = PromptUsage(
            prompt_tokens=before.prompt_tokens + usage.prompt_tokens,
            prompt_cache_hit_tokens=before.prompt_cache_hit_tokens + usage.prompt_cache_hit_tokens,
            details=before.details,
        )

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)
        self._answer().reasoning(text)

    def content(self, text: str) -> None:
        self._content.append(text)
        self._answer().content(text)

    def reasoning_with_logprobs(self, text: str, entries: list[dict[str, Any]]) -> None:
        self._reasoning.append(text)
        self._answer().reasoning_with_logprobs(text, entries)

    def content_with_logprobs(self, text: str, entries: list[dict[str, Any]]) -> None:
        self._content.append(text)
        self._answer().content_with_logprobs(text, entries)

    def call_started(self, name: str) -> None:
        if name in self._tools:
            self._current = name
            self._arguments = []
        else:
            self._client_calls += 1
            self._answer().call_started(name)

    def call_arguments(self, piece: str, raw: str | None = None) -> None:
        if self._current is None:
            self._answer().call_arguments(piece, raw)
        else:
            self._arguments.append(piece)

    def call_arguments_with_logprobs(
        self, piece: str, raw: str | None, entries: list[dict[str, Any]]
    ) -> None:
        if self._current is None:
            self._answer().call_arguments_with_logprobs(piece, raw, entries)
        else:
            self._arguments.append(piece)

    def call_ended(self, meant: str | None = None) -> None:
        name, self._current = self._current, None
        if name is None:
            self._answer().call_ended(meant)
        else:
            arguments = "".join(self._arguments) if meant is None else meant
            self.calls.append(ServerCall(self._new_id(), name, arguments))

    def end(self, ending: Ending) -> None:
        total = self._total(ending)
        if self.calls and ending.reason is InferenceFinishReason.Stop:
            self.ending = total
        else:
            # Cut short: a call that was begun is not made.
            self._answer().end(total)

    def _total(self, ending: Ending) -> Ending:
        spent = self._spent
        if spent is None:
            return ending
        thought = [n for n in (spent.reasoning_tokens, ending.reasoning_tokens) if n is not None]
        return replace(
            ending,
            completion_tokens=spent.completion_tokens + ending.completion_tokens,
            reasoning_tokens=sum(thought) if thought else None,
            server_tool_use=spent.tools,
        )

    def finish(self, *, paused: bool, tools: Mapping[str, int]) -> None:
        """End the answer behind this turn after all. Only while `ending` waits."""
        ending = self.ending
        if ending is None:
            raise RuntimeError("the turn has ended already; finish only what waits")
        self.ending = None
        self._inner.end(replace(ending, paused=paused, server_tool_use=dict(tools)))

    def spent(self, tools: Mapping[str, int]) -> Spent:
        """What this turn and those before it took. Only while `ending` waits."""
        ending = self.ending
        if ending is None:
            raise RuntimeError("the turn has ended already; nothing waits")
        return Spent(
            self._inner.prompt_usage,
            ending.completion_tokens,
            ending.reasoning_tokens,
            dict(tools),
        )
