"""The stream processor: backend chunks in, protocol events out."""

from __future__ import annotations

import contextlib
from typing import Generic, TypeVar

from deepinfer_recipe.base.errors import EncodeError, StreamError
from deepinfer_recipe.conversation.inference import (
    InferenceChunk,
    InferenceFinishReason,
    PromptUsage,
)
from deepinfer_recipe.conversation.parsing_options import ParsingOptions
from deepinfer_recipe.parsing.output_parser import OutputParser, marks_of, sign
from deepinfer_recipe.prompts.tokenizer import Tokenizer
from deepinfer_recipe.protocols.common.generator import ChunkGenerator, Ending
from deepinfer_recipe.protocols.common.stream_event import StreamEvent
from deepinfer_recipe.serving.token_reader import TokenReader

E = TypeVar("E", bound=StreamEvent)


def _behind(texts: list[str], unread_chars: int) -> int:
    """How many of the last tokens lie wholly behind a matched stop sequence."""
    if not unread_chars:
        return 0
    count = 0
    for text in reversed(texts):
        if len(text) > unread_chars:
            break
        unread_chars -= len(text)
        count += 1
    return count


class StreamProcessor(Generic[E]):
    """Turns the chunks of one backend answer into the events of one protocol.

    Push `ready` (optional), then `text` or `tokens` chunks, then `finish`; call `finish()`
    when the backend has nothing more. A stop sequence finishes the processor early: push
    nothing once `finished` is true, and tell the backend to stop.
    """

    __slots__ = (
        "_closed",
        "_completion_tokens",
        "_counts_reasoning",
        "_finished",
        "_generator",
        "_is_begun",
        "_options",
        "_parser",
        "_reader",
        "_reasoning_tokens",
        "_recovers",
        "_reports_reasoning",
        "_started",
        "_tokenizer",
    )

    def __init__(
        self,
        generator: ChunkGenerator[E],
        options: ParsingOptions,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Consume the generator. The optional tokenizer decodes `tokens` chunks."""
        generator.consume()
        self._generator = generator
        self._options = options
        self._tokenizer = tokenizer
        self._reader: TokenReader | None = None
        self._parser = self._parser_of_tokens() or self._parser_of_text()
        self._is_begun = False
        self._recovers = options.recover_tool_calls
        # The reference counts thinking only in token ids; a text chunk belongs to where it begins.
        self._reports_reasoning = options.thinking_initial_stage is not None
        self._counts_reasoning = self._recovers and self._reports_reasoning
        self._started = False
        self._finished = False
        self._closed = False
        self._completion_tokens = 0
        self._reasoning_tokens: int | None = None

    def _parser_of_text(self) -> OutputParser:
        return OutputParser(self._options, self._generator)

    def _parser_of_tokens(self) -> OutputParser | None:
        """A parser that tells special tokens from text that spells them; None without a tokenizer.

        The reference does not tell them apart; neither does it here when it is not to recover.
        """
        tokenizer, options = self._tokenizer, self._options
        if tokenizer is None:
            return None
        signs: dict[str, str] = {}
        ids: dict[int, str] = {}
        for number, mark in enumerate(marks_of(options) if options.recover_tool_calls else ()):
            with contextlib.suppress(EncodeError):
                ids[tokenizer.special_id(mark)] = signs[mark] = sign(number)
        reader = self._reader = TokenReader(
            tokenizer, self._generator, reports_arguments=options.tool_call_logprobs, signs=ids
        )
        parser = OutputParser(options, reader, signs)
        reader.spell, reader.think_end = parser.spell, parser.think_end
        return parser

    def _begin_with_text(self) -> None:
        """The backend decodes by itself: what spells a special token is one."""
        self._is_begun = True
        if self._recovers and self._reader is not None:
            self._reader = None
            self._parser = self._parser_of_text()

    @property
    def finished(self) -> bool:
        """Whether processing completed normally and the processor remains unclosed."""
        return self._finished and not self._closed

    @property
    def tool_call_repairs(self) -> list[str]:
        """What had to be mended in malformed tool calls, in order."""
        return list(self._parser.repairs)

    def push(self, chunk: InferenceChunk) -> list[E]:
        """Process one chunk; returns the events it causes.

        Raises `StreamError` (a `RuntimeError`) after completion or close.
        """
        if self._finished or self._closed:
            raise StreamError("the processor is finished; make a new one for another answer")
        out: list[E] = []
        self._generator.out = out
        if chunk.kind == "text":
            if not self._started:
                self._start(PromptUsage(), None)
            self._completion_tokens += chunk.token_count or 0
            if not self._is_begun and chunk.content:
                self._begin_with_text()
            parser = self._parser
            if self._reader is None and self._counts_reasoning and parser.in_reasoning:
                self._reasoning_tokens = (self._reasoning_tokens or 0) + (chunk.token_count or 0)
            parser.feed(chunk.content or "")
            if parser.stopped_by is not None:
                self._finish(InferenceFinishReason.Stop)
        elif chunk.kind == "finish":
            reason = chunk.finish_reason or InferenceFinishReason.Stop
            self._finish(reason)
        elif chunk.kind == "ready":
            if not self._started:
                self._start(chunk.prompt_usage or PromptUsage(), chunk.system_fingerprint)
        else:
            self._tokens(chunk)
        return out

    def _tokens(self, chunk: InferenceChunk) -> None:
        """Decode and parse token ids; anything wrong with them closes the processor."""
        if self._reader is None:
            self._closed = True
            raise StreamError(
                "tokens chunks need a tokenizer, and an answer is text chunks or tokens chunks "
                "throughout: pass a tokenizer to the processor, and push one kind"
                if self._tokenizer is None or self._recovers
                else "tokens chunks need a tokenizer: pass one to the processor"
            )
        self._is_begun = True
        if not self._started:
            self._start(PromptUsage(), None)
        ids, logprobs = chunk.token_ids or [], chunk.logprobs
        if logprobs is not None and len(logprobs) != len(ids):
            self._closed = True
            raise StreamError(
                f"a chunk of {len(ids)} tokens came with {len(logprobs)} log probabilities"
            )
        # Tokens are followed one by one where thinking is counted or log probabilities are kept.
        is_tracked = logprobs is not None or self._parser.in_reasoning
        try:
            texts = [
                self._reader.read(
                    token, None if logprobs is None else logprobs[place], is_tracked=is_tracked
                )
                for place, token in enumerate(ids)
            ]
        except EncodeError as error:
            self._closed = True
            raise StreamError(str(error)) from error
        self._parser.feed("".join(texts))
        self._completion_tokens += len(ids) - _behind(texts, self._parser.unread_chars)
        if self._parser.stopped_by is not None:
            self._finish(InferenceFinishReason.Stop)

    def _start(self, usage: PromptUsage, fingerprint: str | None) -> None:
        self._started = True
        self._generator.start(usage, fingerprint)

    def _finish(self, reason: InferenceFinishReason) -> None:
        if not self._started:
            self._start(PromptUsage(), None)
        if self._reader is not None:
            # Bytes of a character that never became whole.
            self._parser.feed(self._reader.rest())
        mends = self._recovers or reason is InferenceFinishReason.Stop
        self._parser.finish(mends=mends)
        self._finished = True
        self._generator.end(
            Ending(
                reason,
                self._parser.stopped_by,
                self._completion_tokens,
                self._thinking_tokens(),
            )
        )

    def _thinking_tokens(self) -> int | None:
        if self._reader is not None and self._reports_reasoning:
            return self._reader.reasoning_tokens
        return self._reasoning_tokens

    def finish(self) -> list[E]:
        """Close the input and process buffered output; nothing more after completion.

        Raises `StreamError` after close.
        """
        if self._closed:
            raise StreamError("the processor is closed")
        if self._finished:
            return []
        out: list[E] = []
        self._generator.out = out
        self._finish(InferenceFinishReason.Stop)
        return out

    def close(self) -> None:
        """Release processing state without producing successful completion."""
        self._closed = True
