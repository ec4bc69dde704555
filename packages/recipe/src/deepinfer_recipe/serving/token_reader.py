"""Reading token ids: text as characters become whole, and log probabilities of what is shown.

The parser decides later which text is shown. The reader sits between the parser and the
generator: it remembers the text of the tokens read, and when a piece of the answer leaves,
hands on the entries of the tokens that spell it. Tokens of markup, of `</think>` and of
dropped newlines leave no entry.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_recipe.conversation.inference import Logprob
from deepinfer_recipe.prompts.tokenizer import Tokenizer
from deepinfer_recipe.protocols.common.generator import ChunkGenerator


@dataclass(slots=True)
class _Read:
    """Text that some tokens completed, how many they are, and their entries."""

    text: str
    tokens: int
    entries: list[dict[str, Any]]


class TokenReader:
    """Decodes ids for the parser, and is the parser's sink in front of the generator."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        generator: ChunkGenerator[Any],
        *,
        reports_arguments: bool = False,
        signs: Mapping[int, str] | None = None,
    ) -> None:
        """reports_arguments: whether entries of tokens in tool arguments are handed on too.

        signs: what stands for some special tokens in the text that is read.
        """
        self._signs = dict(signs or {})
        self.spell: Callable[[str], str] = str
        """Makes text to be shown of text that was read, signs spelled out."""
        self._reports_arguments = reports_arguments
        self._behind_colon = False
        """Whether the last piece of arguments announced a value."""
        self._tokenizer = tokenizer
        self.think_end = ""
        """What ends the thinking in the text that is read; it is never shown."""
        self._generator = generator
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting: list[dict[str, Any]] = []
        """Entries of tokens whose bytes are not a whole character yet."""
        self._waiting_tokens = 0
        self.reasoning_tokens = 0
        """Tokens of which something was shown as thinking."""
        self._read: deque[_Read] = deque()

    def read(self, token_id: int, logprob: Logprob | None, *, is_tracked: bool) -> str:
        """The text that this token completes. Raises `EncodeError` for an unknown id.

        A tracked token is counted, and its entry handed on, when its text is shown.
        """
        raw = self._tokenizer.token_bytes(token_id)
        sign = self._signs.get(token_id)
        text = self._decoder.decode(raw) if sign is None else self.rest() + sign
        if logprob is not None:
            value, likeliest = logprob
            entry = self._entry(raw, value)
            entry["top_logprobs"] = [
                self._entry(self._tokenizer.token_bytes(other), other_value)
                for other, other_value in likeliest
            ]
            self._waiting.append(entry)
        if is_tracked:
            self._waiting_tokens += 1
            if text:
                self._read.append(_Read(text, self._waiting_tokens, self._waiting))
                self._waiting = []
                self._waiting_tokens = 0
        return text

    def rest(self) -> str:
        """What is left of a character that never became whole."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest

    def _entry(self, raw: bytes, logprob: float) -> dict[str, Any]:
        try:
            shown = raw.decode()
        except UnicodeDecodeError:
            shown = "".join(f"\\x{byte:02x}" for byte in raw)
        return {"token": shown, "logprob": logprob, "bytes": list(raw)}

    def _place(self, pending: str, shown: str) -> int:
        """Where in the pending text `shown` lies: not inside the mark, which is never shown."""
        mark = self.think_end
        start = pending.find(shown)
        at = pending.find(mark)
        while 0 <= at < start + len(shown) and start >= 0 and mark not in shown:
            start = pending.find(shown, at + len(mark))
            at = pending.find(mark, at + len(mark))
        return start

    def _shown(self, shown: str) -> tuple[int, list[dict[str, Any]]]:
        """Number and entries of the earliest tokens read whose text spells `shown`."""
        if not self._read:
            return 0, []
        start = self._place("".join(read.text for read in self._read), shown)
        if start < 0:
            return 0, []
        end = start + len(shown)
        entries: list[dict[str, Any]] = []
        tokens = position = 0
        while self._read and position < end:
            read = self._read.popleft()
            past = position + len(read.text)
            if past > start:
                entries += read.entries
                tokens += read.tokens
            if past > end:
                # The rest of a token shown in part has no entry of its own.
                self._read.appendleft(_Read(read.text[end - position :], 0, []))
            position = past
        return tokens, entries

    def reasoning(self, text: str) -> None:
        """More of the thinking."""
        tokens, entries = self._shown(text)
        text = self.spell(text)
        self.reasoning_tokens += tokens
        if entries:
            self._generator.reasoning_with_logprobs(text, entries)
        else:
            self._generator.reasoning(text)

    def content(self, text: str) -> None:
        """More of the answer."""
        _, entries = self._shown(text)
        text = self.spell(text)
        if entries:
            self._generator.content_with_logprobs(text, entries)
        else:
            self._generator.content(text)

    def call_started(self, name: str) -> None:
        """A tool call begins."""
        self._generator.call_started(name)

    def call_arguments(self, piece: str, raw: str | None = None) -> None:
        """More of the arguments' JSON text; only values are spelled by tokens of their own.

        A string's pieces come decoded beside their JSON; another value comes whole, behind the
        colon (log probabilities on arguments are for recovering parsers).
        """
        is_value = raw is not None or (self._behind_colon and piece != '"')
        self._behind_colon = raw is None and piece == ": " and not self._behind_colon
        entries: list[dict[str, Any]] = []
        if is_value and self._reports_arguments:
            _, entries = self._shown(piece if raw is None else raw)
        if raw is not None:
            raw = self.spell(raw)
        if entries:
            self._generator.call_arguments_with_logprobs(piece, raw, entries)
        else:
            self._generator.call_arguments(piece, raw)

    def call_ended(self, meant: str | None = None) -> None:
        """The current call is complete."""
        self._generator.call_ended(meant)
