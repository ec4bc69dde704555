"""Settings of the output parser: where it starts and what it looks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal, TypeAlias

from deepinfer_recipe.conversation.special_tokens import DEFAULT_SPECIAL_TOKENS, SpecialTokens

Dialect: TypeAlias = Literal["dsml", "hermes", "llama3", "mistral"]
"""How a model writes tool calls: the markup of DeepSeek V4; a JSON object between `<tool_call>`
tags; the bare JSON object; a list behind `[TOOL_CALLS]`. All but the first think in `<think>`."""


class ThinkingInitialStage(Enum):
    """The stage where parsing begins in thinking mode."""

    ReasoningStart = "ReasoningStart"
    """Begin the reasoning content of a new assistant turn, discarding leading newlines."""
    ReasoningContinuation = "ReasoningContinuation"
    """Continue the reasoning of a prefix continuation, preserving leading newlines."""
    ContentContinuation = "ContentContinuation"
    """Continue the answer of a prefix continuation whose reasoning has ended.

    Leading newlines are preserved.
    """

    def starts_in_reasoning(self) -> bool:
        """Return whether parsing begins in reasoning content."""
        return self is not ThinkingInitialStage.ContentContinuation

    def __repr__(self) -> str:
        return f"ThinkingInitialStage.{self.name}"


class ParsingOptions:
    """Settings of the stream parser.

    parse_tool_calls: whether to parse model-specific tool-call markup.
    starts_in_tool_calls: whether parsing begins inside the tool-call block that the prompt
        opened (a required tool choice); takes precedence over `thinking_initial_stage`.
    parse_json_output: whether to recognize fenced or bare JSON output and replace the text
        around it with spaces.
    thinking_initial_stage: the stage where parsing begins in thinking mode; None means
        thinking mode is off. A stage also makes the processor report reasoning tokens.
    recover_tool_calls: mend malformed tool-call markup so that arguments are always a JSON
        object, keep further blocks of calls and the text behind them.
    dialect: how the model writes tool calls.
    starts_in_thinking: whether the prompt opens the thinking; otherwise the model does, or not.
    tool_parameters: the parameters that each declared tool has, where they are known.
    tool_call_logprobs: whether tokens of tool arguments have log probabilities too.
    """

    __slots__ = (
        "_special_tokens",
        "_stop_sequences",
        "dialect",
        "parse_json_output",
        "parse_tool_calls",
        "recover_tool_calls",
        "starts_in_thinking",
        "starts_in_tool_calls",
        "thinking_initial_stage",
        "tool_call_logprobs",
        "tool_parameters",
    )

    def __init__(
        self,
        *,
        parse_tool_calls: bool = True,
        starts_in_tool_calls: bool = False,
        parse_json_output: bool = False,
        thinking_initial_stage: ThinkingInitialStage | None = None,
        stop_sequences: Sequence[str] | None = None,
        special_tokens: SpecialTokens | None = None,
        recover_tool_calls: bool = False,
        tool_call_logprobs: bool = False,
        tool_parameters: Mapping[str, frozenset[str]] | None = None,
        dialect: Dialect = "dsml",
        starts_in_thinking: bool = True,
    ) -> None:
        self.dialect: Dialect = dialect
        self.starts_in_thinking = starts_in_thinking
        self.parse_tool_calls = parse_tool_calls
        self.starts_in_tool_calls = starts_in_tool_calls
        self.parse_json_output = parse_json_output
        self.thinking_initial_stage = thinking_initial_stage
        self.recover_tool_calls = recover_tool_calls
        self.tool_call_logprobs = tool_call_logprobs
        self.tool_parameters = dict(tool_parameters or {})
        self.stop_sequences = stop_sequences or ()
        self._special_tokens = special_tokens or DEFAULT_SPECIAL_TOKENS

    @property
    def stop_sequences(self) -> list[str]:
        """Texts that end the answer; matched in content, not in reasoning or markup.

        An empty one raises `ValueError`.
        """
        return list(self._stop_sequences)

    @stop_sequences.setter
    def stop_sequences(self, value: Sequence[str]) -> None:
        if "" in value:
            raise ValueError("a stop sequence must not be empty: it would match everywhere")
        self._stop_sequences = tuple(value)

    @property
    def special_tokens(self) -> SpecialTokens:
        """Spellings of the tokens in the output."""
        return self._special_tokens

    @special_tokens.setter
    def special_tokens(self, value: SpecialTokens) -> None:
        self._special_tokens = value

    def at_stage(self, stage: ThinkingInitialStage | None) -> ParsingOptions:
        """The same for the next turn of an answer, which begins at this stage."""
        return ParsingOptions(
            parse_tool_calls=self.parse_tool_calls,
            parse_json_output=self.parse_json_output,
            thinking_initial_stage=stage,
            stop_sequences=self._stop_sequences,
            special_tokens=self._special_tokens,
            recover_tool_calls=self.recover_tool_calls,
            tool_call_logprobs=self.tool_call_logprobs,
            tool_parameters=self.tool_parameters,
            dialect=self.dialect,
            starts_in_thinking=self.starts_in_thinking,
        )

    def __repr__(self) -> str:
        return (
            f"ParsingOptions(parse_tool_calls={self.parse_tool_calls}, "
            f"starts_in_tool_calls={self.starts_in_tool_calls}, "
            f"parse_json_output={self.parse_json_output}, "
            f"thinking_initial_stage={self.thinking_initial_stage}, "
            f"stop_sequences={self.stop_sequences}, "
            f"recover_tool_calls={self.recover_tool_calls})"
        )
