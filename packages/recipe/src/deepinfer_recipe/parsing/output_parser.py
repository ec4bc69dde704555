"""The output parser: model text in any cut, to reasoning, content and tool calls.

A machine of small states. Each state takes the text it held back plus the new text, hands on
what is certain, keeps back what may still turn out to be markup or a stop sequence, and either
waits or passes the rest to the next state. The result does not depend on how the text is cut,
except for the number of spaces around JSON in JSON mode. The states inside a tool-call block
are in `call_parser`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from deepinfer_recipe.conversation.parsing_options import ParsingOptions, ThinkingInitialStage
from deepinfer_recipe.conversation.special_tokens import SpecialToken
from deepinfer_recipe.parsing.call_parser import CallParser
from deepinfer_recipe.parsing.json_calls import BareCalls, MarkedCallParser, TaggedCallParser
from deepinfer_recipe.parsing.output_sink import OutputSink
from deepinfer_recipe.parsing.partial_match import SHORT, Patterns, alternation, patterns_of
from deepinfer_recipe.parsing.recovering_parser import RecoveringCallParser

AnyCallParser: TypeAlias = CallParser | RecoveringCallParser | TaggedCallParser | MarkedCallParser
_STREAMING = (CallParser, RecoveringCallParser)
"""Parsers that hand on the text of a value while it comes."""
State = Callable[[str], str | None]
"""Consumes text; returns what is left for the (changed) current state, None to wait."""

_FENCES = ("```json\n", "```\n")
_JSON_END = "\n```"
_BLOCKS = ("calls", "tool_calls", "function_calls")
_BLOCK_TAGS = tuple(f"{blank}{tag}>" for blank in (" ", "") for tag in _BLOCKS)
_CALL_TAGS = tuple(f"{b}invoke name={q}" for b in (" ", "") for q in ('"', "'"))
_OPENING_TAGS = (*_BLOCK_TAGS, *_CALL_TAGS)
_THINK_START = "<think>"
_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL_OPEN, _MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_PYTHON_TAG = "<|python_tag|>"


def marks_of(options: ParsingOptions) -> tuple[str, ...]:
    """The special tokens that answers are parsed by, as the model's vocabulary spells them."""
    tokens = options.special_tokens
    think_end = tokens.token(SpecialToken.ThinkingEnd)
    match options.dialect:
        case "dsml":
            return think_end, tokens.token(SpecialToken.Dsml)
        case "hermes":
            return think_end, _THINK_START, _HERMES_OPEN, _HERMES_CLOSE
        case "mistral":
            return think_end, _THINK_START, _MISTRAL_OPEN, _MISTRAL_ARGUMENTS
        case "llama3":
            return think_end, _THINK_START, _PYTHON_TAG


def sign(number: int) -> str:
    """What stands for the n-th special token in text made of token ids.

    No text that is decoded holds half of a surrogate pair, so nothing that ordinary tokens spell
    is taken for one of them.
    """
    return chr(0xD800 + number)


class OutputParser:
    """Parses one answer. `feed` text in any cut, then `finish` once."""

    def __init__(
        self, options: ParsingOptions, sink: OutputSink, signs: Mapping[str, str] | None = None
    ) -> None:
        """signs: what stands for which special token (see `marks_of`) in the text that is fed, in
        a recovering parser; of the others whatever spells them is one.
        """
        self._sink = sink
        self._recovers = options.recover_tool_calls
        self._stops = tuple(options.stop_sequences)
        self._stop_reach = max(map(len, self._stops), default=0)
        read = dict(signs or {}) if self._recovers else {}
        self._signs = {ord(one): spelled for spelled, one in read.items()}
        self._think_start = read.get(_THINK_START, _THINK_START)
        think_end = options.special_tokens.token(SpecialToken.ThinkingEnd)
        self.think_end = self._think_end = read.get(think_end, think_end)
        """What ends the thinking, in the text that is fed."""
        self._bare: BareCalls | None = None
        self._calls: AnyCallParser
        block_ends = self._choose_markup(options, sink, read)
        if not options.parse_tool_calls:
            self._open = self._bare = None
        self._quote: list[str] = []
        """A block of calls inside thinking, until what follows tells what it is."""
        self._blanks: list[str] = []
        """Blanks behind it."""
        self._quote_ends = alternation(self._think_end, *block_ends)
        self._quote_patterns = patterns_of(self._think_end, *block_ends)
        self._opening_newlines = 0
        """Newlines in front of an opening that may turn out to be none."""
        self._opened_in_reasoning = False
        self._held = ""
        self._newlines = 0
        """Newlines held back before `_held`: they vanish if it becomes a mark."""
        self.stopped_by: str | None = None
        """The stop sequence that ended the answer."""
        self.unread_chars = 0
        """How much of the last text fed lies behind that stop sequence."""
        self._prepare()
        self._answer = self._preamble if options.parse_json_output else self._content
        if self._bare is not None:
            self._answer = self._bare_calls
        self._go(self._first_state(options))

    def _choose_markup(
        self, options: ParsingOptions, sink: OutputSink, read: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Set up how calls are written; returns what ends a block of them."""
        self._opening_tags: tuple[str, ...] = ("",)
        """What must follow an opening to make it one, where there is a choice."""
        match options.dialect:
            case "dsml":
                dsml = options.special_tokens.token(SpecialToken.Dsml)
                dsml = read.get(dsml, dsml)
                self._open: str | None = f"<{dsml}"
                self._opening_tags = _OPENING_TAGS
                if self._recovers:
                    declared = options.tool_parameters
                    self._calls = RecoveringCallParser(dsml, sink, declared, self.spell)
                else:
                    self._calls = CallParser(dsml, sink)
                return tuple(f"</{dsml}{tag}" for tag in _BLOCK_TAGS)
            case "hermes":
                self._open = read.get(_HERMES_OPEN, _HERMES_OPEN)
                close = read.get(_HERMES_CLOSE, _HERMES_CLOSE)
                self._calls = TaggedCallParser(close, sink, self.spell)
                return (close,)
            case "mistral":
                self._open = read.get(_MISTRAL_OPEN, _MISTRAL_OPEN)
                mark = read.get(_MISTRAL_ARGUMENTS, _MISTRAL_ARGUMENTS)
                self._calls = MarkedCallParser(mark, sink, self.spell)
                return ("]", "}")
            case "llama3":
                self._open = read.get(_PYTHON_TAG, _PYTHON_TAG)
                self._calls = MarkedCallParser(_MISTRAL_ARGUMENTS, sink, self.spell)
                self._bare = BareCalls(sink, options.tool_parameters, self.spell)
                return ("}",)

    def _prepare(self) -> None:
        marks = (self._think_end,) if self._open is None else (self._think_end, self._open)
        self._marks = alternation(*marks)
        self._mark_patterns = patterns_of(*marks)
        self._content_patterns = self._with_stops(*marks)
        self._json_patterns = self._with_stops(_JSON_END)
        self._preamble_marks = alternation(*marks, *_FENCES, "{", "[")
        self._preamble_patterns = patterns_of(*marks, *_FENCES)

    def _with_stops(self, *texts: str) -> Patterns:
        return Patterns((*texts, *self._stops)) if self._stops else patterns_of(*texts)

    def _first_state(self, options: ParsingOptions) -> State:
        if options.starts_in_tool_calls:
            return self._block
        match options.thinking_initial_stage:
            case ThinkingInitialStage.ReasoningStart:
                if options.dialect != "dsml" and not options.starts_in_thinking:
                    return self._may_think
                return self._leading_reasoning
            case ThinkingInitialStage.ReasoningContinuation:
                return self._reasoning
            case ThinkingInitialStage.ContentContinuation:
                return self._answer
            case None:
                return self._leading_content if options.dialect == "dsml" else self._may_think

    def _go(self, state: State) -> None:
        self._state = state
        # Plain text in these two states passes in one step: see `feed`.
        if state == self._content:
            patterns, emit = self._content_patterns, self._sink.content
        elif state == self._reasoning:
            patterns, emit = self._mark_patterns, self._sink.reasoning
        else:
            self._fast = None
            return
        self._fast = (patterns.has_first, patterns.is_plain, emit)

    @property
    def is_done(self) -> bool:
        """Whether a stop sequence ended the answer."""
        return self.stopped_by is not None

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the thinking part."""
        return self._state in (self._reasoning, self._leading_reasoning)

    def spell(self, text: str) -> str:
        """Text to be shown, signs of special tokens spelled out."""
        if self._signs and not text.isascii():
            return text.translate(self._signs)
        return text

    @property
    def repairs(self) -> list[str]:
        """What had to be mended in tool calls, in order."""
        return self._calls.repairs if self._bare is None else self._bare.repairs

    def feed(self, text: str) -> None:
        """Take the next piece of the answer. The hot path: plain text passes in one step."""
        fast = self._fast
        if fast is None or self._held:
            text = "\n" * self._newlines + self._held + text
        else:
            if self._newlines:
                # A long run of newlines must not be looked at again and again.
                # Once it is longer than any stop sequence, one more newline completes none.
                if self._newlines >= self._stop_reach and not text.strip("\n"):
                    self._newlines += len(text)
                    return
                text = "\n" * self._newlines + text
            has_first, is_plain, emit = fast
            if text and ((len(text) <= SHORT and not has_first(text)) or is_plain(text)):
                self._newlines = 0
                emit(text)
                return
        self._held = ""
        self._newlines = 0
        rest: str | None = text
        while rest:
            rest = self._state(rest)

    def finish(self, *, mends: bool) -> None:
        """The answer is over: what was held back leaves; `mends` closes a call cut short."""
        if self._state == self._behind_quote:
            self._take_quote()
        held = "\n" * self._newlines + self._held
        self._held, self._newlines = "", 0
        state = self._state
        if isinstance(self._calls, CallParser):
            if self._calls.is_inside:
                self._calls.finish(held, mends=mends)
                return
        elif state == self._block:
            self._calls.finish(held)
            self._emit_lost()
            return
        if self._bare is not None and state == self._bare_calls:
            if text := self._bare.finish() + held:
                self._sink.content(text)
        elif state == self._opening_tag:
            self._keep_opening(held)
        elif state == self._quoted:
            self._release_quote(held)
        elif not held:
            return
        elif state == self._reasoning:
            self._sink.reasoning(held)
        elif state in (self._content, self._json, self._may_think):
            self._sink.content(held)
        elif state in (self._preamble, self._after_json):
            self._sink.content(" ")

    # -- thinking and text -------------------------------------------------------------

    def _may_think(self, text: str) -> str | None:
        """The beginning of an answer that opens its thinking itself, or has none."""
        body = text.lstrip(" \n")
        if body.startswith(self._think_start):
            self._go(self._leading_reasoning)
            return body[len(self._think_start) :]
        if self._think_start.startswith(body):
            self._held = text
            return None
        self._go(self._leading_content)
        return text

    def _bare_calls(self, text: str) -> str | None:
        assert self._bare is not None, "only one dialect has bare calls"
        rest = self._bare.feed(text)
        if rest is not None:
            self._go(self._content)
        return rest

    def _leading_reasoning(self, text: str) -> str | None:
        text = text.lstrip("\n")
        if text:
            self._go(self._reasoning)
        return text

    def _reasoning(self, text: str) -> str | None:
        mark = self._marks.search(text)
        if mark is None:
            self._keep(text, self._mark_patterns.held(text), self._sink.reasoning)
            return None
        before = text[: mark.start()].rstrip("\n")
        if before:
            self._sink.reasoning(before)
        self._behind(mark.group(), self._leading_content, mark.start() - len(before))
        return text[mark.end() :]

    def _behind(self, mark: str, think_end_state: State, newlines: int) -> None:
        if mark == self._think_end:
            self._go(think_end_state)
        elif self._recovers:
            self._opened_in_reasoning = self.in_reasoning
            self._opening_newlines = newlines
            self._go(self._opening_tag)
        else:
            self._go(self._block)

    def _keep(self, text: str, held: int, emit: Callable[[str], None]) -> None:
        """Hand on `text` but for its last `held` characters and the newlines before them."""
        rest = text[: len(text) - held]
        sure = rest.rstrip("\n")
        if sure:
            emit(sure)
        self._newlines = len(rest) - len(sure)
        self._held = text[len(rest) :]
        if self._held and not self._held.strip("\n"):
            # The beginning of a stop sequence; counted with the others it is not copied again.
            self._newlines += len(self._held)
            self._held = ""

    def _leading_content(self, text: str) -> str | None:
        # Of the stop sequences only a single newline can match in what is skipped.
        if text[0] == "\n" and "\n" in self._stops and self._answer == self._content:
            return self._stop("\n", len(text) - 1)
        rest = text.lstrip("\n")
        if rest:
            self._go(self._answer)
        return rest

    def _stop(self, stop: str, unread_chars: int) -> None:
        self.stopped_by = stop
        self.unread_chars = unread_chars
        self._go(self._finished)

    def _first_stop(self, text: str, start: int) -> tuple[int, str] | None:
        """End and text of the stop sequence that is complete first."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, start)
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = (at + len(stop), stop)
        return best

    def _content(self, text: str) -> str | None:
        sink = self._sink
        position = 0
        while True:
            mark = self._marks.search(text, position)
            stop = self._first_stop(text, position) if self._stops else None
            if stop and (mark is None or stop[0] <= mark.end()):
                before = text[position : stop[0] - len(stop[1])]
                if before:
                    sink.content(before)
                return self._stop(stop[1], len(text) - stop[0])
            if mark is None:
                break
            before = text[position : mark.start()]
            position = mark.end()
            is_opening = mark.group() != self._think_end
            newlines = len(before)
            if is_opening:
                before = before.rstrip("\n")
            if before:
                sink.content(before)
            if is_opening:
                self._behind(mark.group(), self._content, newlines - len(before))
                return text[position:]
        rest = text[position:]
        held = self._content_patterns.held(rest)
        if self._open is not None:
            self._keep(rest, held, sink.content)
        else:
            sure = len(rest) - held
            if sure:
                sink.content(rest[:sure])
            self._held = rest[sure:]
        return None

    def _finished(self, text: str) -> str | None:
        return None

    # -- JSON mode ---------------------------------------------------------------------

    def _preamble(self, text: str) -> str | None:
        return self._outside(text, self._preamble_marks, self._preamble_patterns)

    def _after_json(self, text: str) -> str | None:
        return self._outside(text, self._marks, self._mark_patterns)

    def _outside(self, text: str, marks: re.Pattern[str], patterns: Patterns) -> str | None:
        """Text around the JSON: a space for each piece; marks are looked for as in content."""
        position = 0
        while mark := marks.search(text, position):
            found = mark.group()
            before = text[position : mark.start()]
            if (before.rstrip("\n") if found == self._open else before) != "":
                self._space(before)
            position = mark.end()
            if found == self._think_end:
                continue
            if found == self._open:
                self._behind(found, self._content, 0)
            else:
                self._go(self._json)
                if found not in _FENCES:
                    self._sink.content(found)
            return text[position:]
        rest = text[position:]
        held = patterns.held(rest)
        if self._open is not None:
            self._keep(rest, held, self._space)
        else:
            if held < len(rest):
                self._space(rest)
            self._held = rest[len(rest) - held :]
        return None

    def _space(self, text: str) -> None:
        self._sink.content(" ")

    def _json(self, text: str) -> str | None:
        end = text.find(_JSON_END)
        stop = self._first_stop(text, 0) if self._stops else None
        if stop and (end < 0 or stop[0] <= end + len(_JSON_END)):
            before = text[: stop[0] - len(stop[1])]
            if before:
                self._sink.content(before)
            return self._stop(stop[1], len(text) - stop[0])
        if end >= 0:
            if end:
                self._sink.content(text[:end])
            self._go(self._after_json)
            return text[end + len(_JSON_END) :]
        sure = len(text) - self._json_patterns.held(text)
        if sure:
            self._sink.content(text[:sure])
        self._held = text[sure:]
        return None

    # -- tool calls --------------------------------------------------------------------

    def _opening_tag(self, text: str) -> str | None:
        """Behind an opening, when recovering: only a tag that opens calls makes it one."""
        for tag in self._opening_tags:
            if text.startswith(tag):
                return self._opened(text, tag)
        if any(tag.startswith(text) for tag in self._opening_tags):
            self._held = text
            return None
        self._keep_opening("")
        return text

    def _opened(self, text: str, tag: str) -> str:
        if self._opened_in_reasoning and not self._signs:
            self._quote = ["\n" * self._opening_newlines, self._open or "", tag]
            self._go(self._quoted)
            return text[len(tag) :]
        self._go(self._block)
        if tag in _CALL_TAGS:
            return (self._open or "") + text
        return text[len(tag) :]

    def _keep_opening(self, held: str) -> None:
        """What looked like an opening is text, the newlines before it included."""
        self._calls.repairs.append("markup that opens no call was kept as text")
        text = "\n" * self._opening_newlines + (self._open or "") + held
        if self._opened_in_reasoning:
            self._sink.reasoning(text)
            self._go(self._reasoning)
        else:
            self._sink.content(text)
            self._go(self._answer)

    # A block of calls inside thinking. By text alone a quoted one looks like any other; it is
    # taken for calls only if the answer ends behind it, as it does when a model forgets to end
    # its thinking.

    def _quoted(self, text: str) -> str | None:
        end = self._quote_ends.search(text)
        if end is None:
            sure = len(text) - self._quote_patterns.held(text)
            self._quote.append(text[:sure])
            self._held = text[sure:]
            return None
        if end.group() == self._think_end:
            self._quote.append(text[: end.start()])
            self._release_quote("", ends_thinking=True)
            self._go(self._leading_content)
            return text[end.end() :]
        self._quote.append(text[: end.end()])
        self._go(self._behind_quote)
        return text[end.end() :]

    def _behind_quote(self, text: str) -> str | None:
        self._blanks.append(text)
        if not text.strip():
            return None
        self._release_quote("")
        self._go(self._reasoning)
        text = "".join(self._blanks)
        self._blanks.clear()
        return text

    def _release_quote(self, held: str, *, ends_thinking: bool = False) -> None:
        text = "".join(self._quote) + held
        self._quote = []
        if ends_thinking:
            text = text.rstrip("\n")
        if text:
            self._sink.reasoning(text)

    def _take_quote(self) -> None:
        """The answer ended behind a block: these are calls, and the thinking was not ended."""
        text = "".join(self._quote).lstrip("\n")
        self._quote = []
        self._calls.repairs.append("calls that followed unended thinking were taken as calls")
        self._go(self._block)
        rest: str | None = text
        while rest:
            rest = self._state(rest)

    # -- blocks of calls ---------------------------------------------------------------

    def _block(self, text: str) -> str | None:
        calls = self._calls
        rest, self._held = calls.feed(text)
        # Plain text of a string value passes in one step, like that of an answer.
        is_value = rest is None and not self._held
        self._fast = calls.value_path() if is_value and isinstance(calls, _STREAMING) else None
        if rest is not None:
            self._emit_lost()
            self._go(self._leading_content if self._recovers else self._finished)
        return rest

    def _emit_lost(self) -> None:
        if not isinstance(self._calls, CallParser) and (lost := self._calls.take_lost()):
            self._sink.content(lost)
