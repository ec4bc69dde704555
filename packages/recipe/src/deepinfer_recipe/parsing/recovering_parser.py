"""The states inside a block of tool calls where damaged markup is mended instead of lost.

A value ends at a whole closing tag, and nowhere else: text that only mentions the mark is part of
it. Attributes come in any order and with either quotes; a tag that was not closed is closed by
the next one; text that stands where none belongs is handed back as text of the answer. What is
done beyond the format is told in `repairs`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from deepinfer_recipe.parsing.arguments import Arguments
from deepinfer_recipe.parsing.output_sink import OutputSink
from deepinfer_recipe.parsing.partial_match import Patterns, ValuePath, alternation

_BLOCKS = ("calls", "tool_calls", "function_calls")
_MAX_TAG_CHARS = 4096
_WORD = re.compile(r" ?([A-Za-z_]*)")
_ATTRIBUTES = r"((?:\s+[\w-]+\s*=\s*(?:\"[^\"\n]*\"|'[^'\n]*'))*)"
_EXACT = re.compile(r' name="(.*?)"( string="(?:true|false)")>', re.DOTALL)
"""As the format writes it; such a name may hold anything."""
_NAMED = re.compile(rf"\s+name\s*=\s*([\"'])([^\n]*?)\1{_ATTRIBUTES}\s*>")
_LATE_NAMED = re.compile(rf"{_ATTRIBUTES}\s+name\s*=\s*([\"'])([^\n]*?)\2{_ATTRIBUTES}\s*>")
_UNFINISHED = re.compile(rf"{_ATTRIBUTES}\s+name\s*=\s*([\"'])([^\n]*?)\2{_ATTRIBUTES}")
_BEGUN = "|".join(word[:n] for word in ("name", "string") for n in range(len(word), 0, -1))
_TAGS = ("parameter", "invoke", *_BLOCKS)
_BEGUN_TAG = "|".join(word[:n] for word in _TAGS for n in range(len(word), 0, -1))
_CUT_TAG = re.compile(
    rf" ?(?:{_BEGUN_TAG})?{_ATTRIBUTES}"
    rf"(?:\s+(?:(?:{_BEGUN})(?:\s*=\s*(?:\"[^\"\n]*|'[^'\n]*)?)?)?)?\s*"
)
_STRING = re.compile(r"\sstring\s*=\s*[\"'](true|false)[\"']")
_END = re.compile(r"\s*>")


class RecoveringCallParser:
    """Parses the inside of one or more blocks of tool calls.

    declared: the parameters of each tool, where they are known. spell: makes text to be shown of
    text as it was read.
    """

    def __init__(
        self,
        dsml: str,
        sink: OutputSink,
        declared: Mapping[str, frozenset[str]],
        spell: Callable[[str], str],
    ) -> None:
        self._spell = spell
        self._sink = sink
        self._declared = declared
        mark = re.escape(dsml)
        self._mark = re.compile(f"</?{mark}")
        self._mark_patterns = Patterns((f"<{dsml}", f"</{dsml}"))
        closers = [
            f"</{dsml}{blank}{tag}>"
            for blank in (" ", "")
            for tag in ("parameter", "invoke", *_BLOCKS)
        ]
        openers = [
            f"<{dsml}{blank}{tag}"
            for blank in (" ", "")
            for tag in ("parameter name=", "parameter string=", "invoke name=")
        ]
        self._value_marks = alternation(*closers, *openers)
        self._value_patterns = Patterns((*closers, *openers))
        self._prefix_chars = len(dsml) + 1
        self._state: Callable[[str], str | None] = self._between
        self._arguments: Arguments | None = None
        self._held = ""
        self._loose: list[str] = []
        """Text between the tags of the current call."""
        self._lost: list[str] = []
        self._left_block = False
        self._is_empty = True
        """Whether the current block has held no call yet."""
        self.repairs: list[str] = []

    @property
    def is_inside(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._arguments is not None

    def feed(self, text: str) -> tuple[str | None, str]:
        """Take text; returns `(text behind the block, "")` or `(None, text held back)`."""
        rest: str | None = text
        self._held = ""
        self._left_block = False
        while rest:
            rest = self._state(rest)
            if self._left_block:
                return rest or "", ""
        return None, self._held

    def value_path(self) -> ValuePath | None:
        """How plain text of the current string value passes, where one is being read."""
        arguments = self._arguments
        if self._state != self._value or arguments is None or not arguments.streams:
            return None
        patterns = self._value_patterns
        return patterns.has_first, patterns.is_plain, arguments.more

    def take_lost(self) -> str:
        """Text that stood where none belongs: it is text of the answer."""
        text = self._spell("".join(self._lost)).strip()
        self._lost.clear()
        if self._is_empty and not text:
            self.repairs.append("a block of calls that held none was left out")
        self._is_empty = True
        if text:
            self.repairs.append("text among the tags of a call was kept as text")
        return text

    # -- between tags ------------------------------------------------------------------

    def _between(self, text: str) -> str | None:
        """Outside a value: tags, and text that belongs nowhere."""
        mark = self._mark.search(text)
        if mark is None:
            sure = len(text) - self._mark_patterns.held(text)
            self._stray(text[:sure])
            self._held = text[sure:]
            return None
        self._stray(text[: mark.start()])
        tail = text[mark.start() :]
        head = mark.end() - mark.start()
        word = _WORD.match(tail, head)
        if word is None or (word.end() == len(tail) and len(tail) < _MAX_TAG_CHARS):
            self._held = tail
            return None
        if tail.startswith("</"):
            return self._closing(tail, word)
        return self._opening(tail, word)

    def _stray(self, text: str) -> None:
        if text and self._arguments is not None:
            self._loose.append(text)
        elif text:
            self._lost.append(text)

    def _closing(self, tail: str, word: re.Match[str]) -> str | None:
        if self._may_end(tail, word.end()):
            self._held = tail
            return None
        end = _END.match(tail, word.end(), _MAX_TAG_CHARS)
        tag = word.group(1)
        if end is None and tag and tag not in _TAGS:
            self._stray(tail[: word.end()])  # the mark, and words of no tag
            return tail[word.end() :]
        rest = tail[word.end() if end is None else end.end() :]
        if tag in _BLOCKS or (tag != "parameter" and self._arguments is None):
            if self._arguments is not None:
                self.repairs.append("a call that was not closed ended with its block")
                self._end_call()
            self._left_block = True
        elif tag != "parameter":
            self._end_call()
        return rest

    def _may_end(self, tail: str, behind: int) -> bool:
        """Whether the `>` of a tag without attributes may still come."""
        return len(tail) < _MAX_TAG_CHARS and not tail[behind:].strip()

    def _opening(self, tail: str, word: re.Match[str]) -> str | None:
        tag = word.group(1)
        if tag in _BLOCKS:
            if self._may_end(tail, word.end()):
                self._held = tail
                return None
            end = _END.match(tail, word.end(), _MAX_TAG_CHARS)
            return tail[word.end() if end is None else end.end() :]
        if tag not in ("invoke", "parameter") or (tag == "parameter" and not self.is_inside):
            self._stray(tail[: word.end()])
            return tail[word.end() :]
        border = self._mark.search(tail, word.end())
        limit = min(_MAX_TAG_CHARS, len(tail) if border is None else border.start())
        found = self._header(tail, word.end(), limit)
        if found is not None:
            name, attributes, end = found
            return self._begin(tag, name, attributes, tail[end:])
        if border is None and len(tail) < _MAX_TAG_CHARS:
            self._held = tail
            return None
        unfinished = _UNFINISHED.match(tail, word.end(), limit)
        if unfinished is None:
            self._stray(tail[: word.end()])
            return tail[word.end() :]
        self.repairs.append("a tag that was never completed was taken as complete")
        before, _, name, behind = unfinished.groups()
        rest = tail[unfinished.end() :]
        return self._begin(tag, name, before + behind, rest.removeprefix("\n"))

    def _header(self, tail: str, start: int, limit: int) -> tuple[str, str, int] | None:
        """Name, other attributes and end of a tag that is complete before the next mark."""
        found = _EXACT.match(tail, start, limit)
        if found is not None:
            return found.group(1), found.group(2), found.end()
        found = _NAMED.match(tail, start, limit)
        if found is not None:
            if found.group(1) == "'":
                self._told("attributes of a tag came in other quotes")
            return found.group(2), found.group(3), found.end()
        found = _LATE_NAMED.match(tail, start, limit)
        if found is None:
            return None
        self._told("attributes of a tag came in another order")
        return found.group(3), found.group(1) + found.group(4), found.end()

    def _told(self, repair: str) -> None:
        if repair not in self.repairs:
            self.repairs.append(repair)

    def _begin(self, tag: str, name: str, attributes: str, rest: str) -> str:
        if tag == "invoke":
            if self._arguments is not None:
                self.repairs.append("a call that was not closed ended where the next began")
                self._end_call()
            name = self._spell(name)
            self._sink.call_started(name)
            self._is_empty = False
            declared = self._declared.get(name)
            self._arguments = Arguments(self._sink, self.repairs, declared, self._spell)
            return rest
        flag = _STRING.search(attributes)
        if flag is None:
            self.repairs.append(f"parameter {name!r} did not say whether it is a string")
        arguments = self._arguments
        assert arguments is not None, "a parameter outside a call is text"
        arguments.begin(self._spell(name), is_string=flag is None or flag.group(1) != "false")
        self._state = self._value
        return rest

    def _end_call(self) -> None:
        arguments, self._arguments = self._arguments, None
        assert arguments is not None, "there is a call to end"
        loose = self._spell("".join(self._loose))
        self._loose.clear()
        takes = arguments.takes_loose
        before = len(self.repairs)
        meant = arguments.end(loose)
        taken = takes and len(self.repairs) > before
        if loose.strip() and not taken:
            self._lost.append(loose)
        self._sink.call_ended(meant)

    # -- values ------------------------------------------------------------------------

    def _value(self, text: str) -> str | None:
        arguments = self._arguments
        assert arguments is not None, "a value belongs to a call"
        mark = self._value_marks.search(text) if "<" in text else None
        if mark is None:
            sure = len(text)
            if "<" in text:
                sure -= self._value_patterns.held(text)
            sure -= _line_ends(text[:sure])
            arguments.more(text[:sure])
            self._held = text[sure:]
            return None
        found = mark.group()
        value = text[: mark.start()]
        tag = found[self._prefix_chars + 1 :].strip(" >") if found.startswith("</") else ""
        self._state = self._between
        if tag == "parameter":
            arguments.more(value)
            arguments.end_value()
            return text[mark.end() :]
        arguments.more(value[: len(value) - _line_ends(value)])
        arguments.end_value()
        ended = "with its call" if tag else "where the next tag began"
        self.repairs.append(f"a parameter that was not closed ended {ended}")
        return text[mark.start() :]

    def finish(self, held: str) -> None:
        """The answer ended inside the block: a call that was begun is closed."""
        arguments = self._arguments
        if self._state == self._between and held and not self._is_cut_tag(held):
            self._stray(held)
        if arguments is None:
            return
        if self._state == self._value:
            # What is held, newlines aside, may be the beginning of the closing tag.
            arguments.more(held[: len(held) - len(held.lstrip("\n"))])
            rest = held.lstrip("\n")
            if rest == "<":
                arguments.more(rest)
            arguments.end_value(is_cut=True)
            self._state = self._between
        self.repairs.append("a call cut short was closed")
        self._end_call()

    def _is_cut_tag(self, held: str) -> bool:
        """Whether the answer ended inside what was a tag so far: nothing more can be made of it."""
        mark = self._mark.match(held)
        return mark is None or _CUT_TAG.fullmatch(held, mark.end()) is not None


def _line_ends(value: str) -> int:
    """How many newlines at the end belong to the next tag if the value turns out unclosed."""
    if not value.endswith("\n"):
        return 0
    return 2 if value.endswith("\n\n") else 1
