"""One JSON object that arrives in pieces, written on as it comes.

What is written is the text `json.dumps` would give of the complete object: escapes that need not
be are resolved, blanks are the usual ones. It therefore does not depend on how the text was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from deepinfer_recipe.base.json_closing import closing_of
from deepinfer_recipe.base.json_text import MAX_DEPTH, loads, quote, saturated

Emit = Callable[[str, str | None], None]
"""Takes a piece of JSON text, and the same unescaped where it lies inside a string value."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_BLANKS = re.compile(r"[ \t\n\r]+")
_SCALAR = re.compile(r'[^ \t\n\r,:"{}\[\]]+')
_HIGH, _LOW = "[dD][89abAB][0-9a-fA-F]{2}", "[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|u{_HIGH}\\u{_LOW}|u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}})')
_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_ESCAPE_BEGINS = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}"
    rf"|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?))?"
)
_MAX_SCALAR = 1000
"""Characters of a number or word; what is longer is none."""


class JsonPieces:
    """Feed it the text from the object's opening brace on, until `is_over`.

    emit: takes what is written. repairs: told what had to be mended. spell: makes text to be shown
    of text as it was read.
    """

    def __init__(self, emit: Emit, repairs: list[str], spell: Callable[[str], str]) -> None:
        self._emit = emit
        self._repairs = repairs
        self._spell = spell
        self._held = ""
        """The beginning of an escape, a number or a word."""
        self._stack: list[str] = []
        self._keys: list[set[str]] = []
        self._key: list[str] | None = None
        """The key being read, None outside of keys."""
        self._in_string = False
        self._wants = "value"
        """`value`, `key`, `colon` or `comma`; the first two at the end of a list's or an object's
        beginning may be that end."""
        self._is_first = False
        """Whether the innermost list or object holds nothing yet."""
        self._has_comma = False
        self._out: list[str] = []
        self._raw: list[str] = []
        self._all: list[str] = []
        self._repeats = False
        self.is_over = False
        self.is_broken = False
        """Whether it ended because what follows is no JSON."""

    def feed(self, text: str) -> str | None:
        """Take text; returns what lies behind the object, or what is no JSON; None to go on."""
        text = self._held + text
        self._held = ""
        at = 0
        while at < len(text) and not self.is_over:
            end = self._string(text, at) if self._in_string else self._outside(text, at)
            if end < 0:
                self._held = text[at:]
                break
            at = end
        self._flush()
        return text[at:] if self.is_over else None

    def close(self) -> str:
        """Write what makes it a whole object; returns text that fits nowhere in it."""
        lost, self._held = self._held, ""
        if self._in_string:
            self._text(lost)
            self._end_string()
            lost = ""
        elif lost:
            lost = "" if self._scalar(lost + closing_of(lost)) else lost
        if self._wants == "colon":
            self._write(": null")
        elif self._wants == "value" and self._stack[-1:] == ["}"]:
            self._write("null")
        self._write("".join(reversed(self._stack)) or "{}")
        self._stack.clear()
        self._flush()
        self.is_over = True
        return lost

    @property
    def meant(self) -> str | None:
        """The complete object, where a key in it came twice and the last one holds."""
        if not self._repeats:
            return None
        return json.dumps(loads("".join(self._all)), ensure_ascii=False)

    # -- what is written ----------------------------------------------------------------

    def _write(self, piece: str) -> None:
        if self._raw:
            self._flush()
        self._out.append(piece)

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._key is not None:
            self._key.append(text)
            self._write(quote(self._spell(text))[1:-1])
            return
        if not self._raw:
            self._flush()
        self._raw.append(text)

    def _flush(self) -> None:
        if self._raw:
            raw = "".join(self._raw)
            self._raw = []
            piece = quote(self._spell(raw))[1:-1]
            self._all.append(piece)
            self._emit(piece, raw)
        elif self._out:
            piece = "".join(self._out)
            self._out = []
            self._all.append(piece)
            self._emit(piece, None)

    def _mend(self, what: str) -> None:
        if what not in self._repairs:
            self._repairs.append(what)

    # -- what is read -------------------------------------------------------------------

    def _string(self, text: str, at: int) -> int:
        plain = _PLAIN.match(text, at)
        if plain is not None:
            self._text(plain.group())
            return plain.end()
        if text[at] == '"':
            self._end_string()
            return at + 1
        if text[at] != "\\":
            self._mend("a line break or other control character in a string was escaped")
            self._text(text[at])
            return at + 1
        whole = _ESCAPE.match(text, at)
        if whole is not None:
            self._text(loads(f'"{whole.group()}"'))
            return whole.end()
        if _ESCAPE_BEGINS.fullmatch(text, at):
            return -1
        self._mend("a backslash that escapes nothing was kept as one")
        half = _HALF.match(text, at)
        self._text("\\" if half is None else "\ufffd")
        return at + 1 if half is None else half.end()

    def _end_string(self) -> None:
        self._write('"')
        self._in_string = False
        if self._key is None:
            self._wants = "comma"
            return
        key, self._key = "".join(self._key), None
        self._repeats = self._repeats or key in self._keys[-1]
        self._keys[-1].add(key)
        self._wants = "colon"

    def _outside(self, text: str, at: int) -> int:
        blanks = _BLANKS.match(text, at)
        if blanks is not None:
            return blanks.end()
        char, wants = text[at], self._wants
        if char in "}]" and self._stack[-1:] == [char] and self._may_end():
            self._end()
        elif wants == "colon" and char == ":":
            self._write(": ")
            self._wants = "value"
        elif wants == "comma" and char == ",":
            self._has_comma = True
            self._wants = "key" if self._stack[-1] == "}" else "value"
        elif wants == "key" and char == '"':
            self._begin_item()
            self._key = []
            self._in_string = True
            self._write('"')
        elif wants == "value":
            return self._value(text, at)
        else:
            self._break()
            return at
        return at + 1

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char in "{[" and (self._stack or char == "{") and len(self._stack) < MAX_DEPTH - 1:
            self._begin_item()
            self._write(char)
            self._stack.append("}" if char == "{" else "]")
            self._keys.append(set())
            self._wants = "key" if char == "{" else "value"
            self._is_first = True
        elif char == '"' and self._stack:
            self._begin_item()
            self._in_string = True
            self._write('"')
        else:
            return self._word(text, at)
        return at + 1

    def _word(self, text: str, at: int) -> int:
        word = _SCALAR.match(text, at) if self._stack else None
        if word is not None and len(word.group()) <= _MAX_SCALAR:
            if word.end() == len(text):
                return -1
            if self._scalar(word.group()):
                return word.end()
        self._break()
        return at

    def _scalar(self, word: str) -> bool:
        """Write a number or literal; False, and nothing done, if it is none."""
        try:
            bounded = saturated(word)
            value = loads(bounded)
        except ValueError:
            return False
        if bounded != word:
            self._repairs.append("a number beyond a double became the largest one")
        self._begin_item()
        self._write(json.dumps(value))
        self._wants = "comma"
        return True

    def _may_end(self) -> bool:
        if self._has_comma:
            self._mend("a comma in front of nothing was left out")
            self._has_comma = False
            return True
        return self._wants == "comma" or (self._is_first and self._wants != "colon")

    def _begin_item(self) -> None:
        if self._has_comma:
            self._write(", ")
        self._has_comma = self._is_first = False

    def _end(self) -> None:
        self._write(self._stack.pop())
        self._keys.pop()
        self._wants = "comma"
        self._is_first = False
        self.is_over = not self._stack

    def _break(self) -> None:
        self.is_over = self.is_broken = True
