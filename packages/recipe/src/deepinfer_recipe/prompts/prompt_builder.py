"""Putting a prompt together from its pieces, and finding where its special tokens lie."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from deepinfer_recipe.conversation.image_source import ImageSource
from deepinfer_recipe.conversation.messages import Message
from deepinfer_recipe.conversation.special_tokens import SpecialToken, SpecialTokens, Spelling
from deepinfer_recipe.native import routines as native
from deepinfer_recipe.prompts.formats.prompt_format import PromptFormat, TemplatePiece

UNSUPPORTED_IMAGE = "[Unsupported Image]"

Ranges = list[tuple[int, int]]
"""Half-open `(start, end)` offsets, ascending."""


def _join(parts: list[str], spans: Ranges) -> tuple[str, Ranges, Ranges]:
    """The joined pieces, the offsets of the `Spelling` pieces, and those of `spans` of pieces."""
    ends = list(accumulate(map(len, parts), initial=0))
    special = [(ends[n], ends[n + 1]) for n, part in enumerate(parts) if type(part) is Spelling]
    return "".join(parts), special, [(ends[start], ends[end]) for start, end in spans]


class PromptBuilder:
    """Collects the pieces of a prompt; offsets are counted once, at the end.

    A piece whose type is `Spelling` is a special token; everything else is plain text,
    whatever it spells.
    """

    __slots__ = (
        "_answers",
        "assistant",
        "dsml",
        "eos",
        "format",
        "marks",
        "parts",
        "sources",
        "thinking_end",
        "thinking_start",
        "user",
    )

    def __init__(self, form: PromptFormat, tokens: SpecialTokens) -> None:
        self.format = form
        self.marks = marks = tokens.marks
        # Those of every turn, at hand: looking a member up in an enum takes a while.
        self.user = marks[SpecialToken.User]
        self.assistant = marks[SpecialToken.Assistant]
        self.eos = marks[SpecialToken.Eos]
        self.thinking_start = marks[SpecialToken.ThinkingStart]
        self.thinking_end = marks[SpecialToken.ThinkingEnd]
        self.dsml = marks[SpecialToken.Dsml]
        self.parts: list[str] = []
        self.sources: list[ImageSource] = []
        self._answers: Ranges = []

    def text(self, text: str) -> None:
        """Plain text."""
        self.parts.append(text)

    def special(self, token: SpecialToken) -> None:
        """A special token."""
        self.parts.append(self.marks[token])

    def pieces(self, pieces: Iterable[TemplatePiece]) -> None:
        """A literal of the format."""
        for piece in pieces:
            self.parts.append(piece if isinstance(piece, str) else self.marks[piece])

    def tag(self, opening: str, rest: str) -> None:
        """`opening`, the DSML token, and the rest of a tag."""
        self.parts += (opening, self.dsml, rest)

    def message(self, message: Message) -> None:
        """The text of a message, its pictures as placeholders where the format has any."""
        segments = message.segments
        self.parts.append(segments[0])
        has_pictures = self.format.has_pictures
        if len(segments) > 1:
            mark = self.marks[SpecialToken.Image] if has_pictures else UNSUPPORTED_IMAGE
            for segment in segments[1:]:
                self.parts += (mark, segment)
        if has_pictures:
            self.sources += message.image_sources

    def plain_answer(self, text: str) -> None:
        """A whole turn of the assistant that shows its text alone."""
        parts = self.parts
        parts += (self.assistant, self.thinking_end, text, self.eos)
        self._answers.append((len(parts) - 2, len(parts)))

    @property
    def place(self) -> int:
        """Number of the next piece."""
        return len(self.parts)

    def is_empty_since(self, place: int) -> bool:
        """Whether the pieces from `place` on hold no character."""
        return not any(self.parts[place:])

    def drop_since(self, place: int) -> None:
        """Take back the pieces from `place` on."""
        del self.parts[place:]

    def answer(self, start: int) -> None:
        """The pieces from `start` on are what an assistant wrote."""
        self._answers.append((start, len(self.parts)))

    def joined(self) -> tuple[str, Ranges, Ranges]:
        """The prompt, the offsets of its special tokens, and those of the assistants' words."""
        if native is not None:
            return native.join(self.parts, Spelling, self._answers)
        return _join(self.parts, self._answers)
