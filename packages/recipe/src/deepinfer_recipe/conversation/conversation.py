"""A conversation and its prompt configuration: the value that every prompt format renders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from deepinfer_recipe.conversation.messages import (
    Message,
    ReasoningEffort,
    ResponseFormat,
    ToolChoice,
)
from deepinfer_recipe.conversation.tool_types import ToolDefinition


class Conversation:
    """A conversation and its prompt configuration.

    Thinking mode is enabled by default, tool selection defaults to `auto`, and the response
    format defaults to `text`. `response_format` accepts `text` or `json_object`;
    `response_schema` selects the `json_schema` format with that JSON Schema, and
    `response_regex` selects the `regex` format with that regular expression. Supplying both,
    or either with `json_object`, raises `ValueError`.
    """

    __slots__ = (
        "_messages",
        "_reasoning_effort",
        "_response_format",
        "_response_regex",
        "_response_schema",
        "_thinking_mode",
        "_tool_choice",
        "_tools",
    )

    def __init__(
        self,
        messages: Sequence[Message] | None = None,
        *,
        thinking_mode: bool = True,
        tools: Sequence[ToolDefinition] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning_effort: ReasoningEffort | None = None,
        response_format: Literal["text", "json_object"] = "text",
        response_schema: Any | None = None,
        response_regex: str | None = None,
    ) -> None:
        if tool_choice not in ("auto", "none", "required"):
            raise ValueError(
                f'invalid tool_choice "{tool_choice}"; expected "auto", "none", or "required"'
            )
        if reasoning_effort not in (None, "low", "high", "xhigh", "max"):
            raise ValueError(
                f'invalid reasoning_effort "{reasoning_effort}"; '
                'expected "low", "high", "xhigh", or "max"'
            )
        if response_format not in ("text", "json_object"):
            raise ValueError(
                f'invalid response_format "{response_format}"; expected "text" or "json_object"'
            )
        if response_schema is not None and response_regex is not None:
            raise ValueError("response_schema and response_regex cannot be combined")
        if response_format == "json_object" and (
            response_schema is not None or response_regex is not None
        ):
            raise ValueError(
                'response_format "json_object" cannot be combined with '
                "response_schema or response_regex"
            )
        self._messages = tuple(messages or ())
        self._thinking_mode = thinking_mode
        self._tools = tuple(tools or ())
        self._tool_choice: ToolChoice = tool_choice
        self._reasoning_effort: ReasoningEffort | None = reasoning_effort
        self._response_format: ResponseFormat = response_format
        self._response_schema = response_schema
        self._response_regex = response_regex
        if response_schema is not None:
            self._response_format = "json_schema"
        elif response_regex is not None:
            self._response_format = "regex"

    def continued(self, messages: Sequence[Message]) -> Conversation:
        """This conversation with more messages; no call is required of the next turn."""
        return Conversation(
            [*self._messages, *messages],
            thinking_mode=self._thinking_mode,
            tools=self._tools,
            tool_choice="auto" if self._tool_choice == "required" else self._tool_choice,
            reasoning_effort=self._reasoning_effort,
            response_format="json_object" if self._response_format == "json_object" else "text",
            response_schema=self._response_schema,
            response_regex=self._response_regex,
        )

    @property
    def messages(self) -> list[Message]:
        """The messages, oldest first."""
        return list(self._messages)

    @property
    def history(self) -> tuple[Message, ...]:
        """The messages, not copied."""
        return self._messages

    @property
    def has_tools(self) -> bool:
        """Whether there is a tool and the model may call it."""
        return bool(self._tools) and self._tool_choice != "none"

    @property
    def thinking_mode(self) -> bool:
        """Whether the answer begins with a thinking part."""
        return self._thinking_mode

    @property
    def tools(self) -> list[ToolDefinition]:
        """The tools the model may call."""
        return list(self._tools)

    @property
    def tool_choice(self) -> ToolChoice:
        """`auto`, `none`, or `required` (the prompt opens the tool-call block itself)."""
        return self._tool_choice

    @property
    def reasoning_effort(self) -> ReasoningEffort | None:
        """How hard to think; None in thinking mode renders as `high`."""
        return self._reasoning_effort

    @property
    def response_format(self) -> ResponseFormat:
        """Requested answer format; the caller enforces it during inference."""
        return self._response_format

    @property
    def response_schema(self) -> Any | None:
        """The JSON Schema of a `json_schema` response format, or None."""
        return self._response_schema

    @property
    def response_regex(self) -> str | None:
        """The regular expression of a `regex` response format, or None."""
        return self._response_regex

    def __repr__(self) -> str:
        return (
            f"Conversation(messages={len(self._messages)}, thinking_mode={self._thinking_mode}, "
            f"tools={len(self._tools)}, tool_choice={self._tool_choice!r}, "
            f"reasoning_effort={self._reasoning_effort!r}, "
            f"response_format={self._response_format!r})"
        )
