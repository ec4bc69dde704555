"""What a stream processor needs from the generator of a protocol's events."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from deepinfer_recipe.base.errors import StreamError
from deepinfer_recipe.conversation.inference import InferenceFinishReason, PromptUsage
from deepinfer_recipe.protocols.common.stream_event import StreamEvent

CallIds = Callable[[int], str]
"""Makes the id of the n-th call of an answer."""

_ID_ALPHABET = (string.ascii_letters + string.digits).encode()
_ID_CHARS = 24
# Bytes from the last whole multiple of the alphabet on are dropped, so that none is likelier.
_DROPPED = bytes(range(256 - 256 % len(_ID_ALPHABET), 256))
_TO_ALPHABET = bytes(_ID_ALPHABET[byte % len(_ID_ALPHABET)] for byte in range(256))

E = TypeVar("E", bound=StreamEvent)


def random_call_id(index: int, *, after_thinking: bool = True) -> str:
    """`call_` + two-digit index + `_` + 24 random alphanumerics, behind `ET_` if the model was
    to think first and did not.
    """
    mark = "" if after_thinking else "ET_"
    unique = b""
    while len(unique) < _ID_CHARS:
        unique += secrets.token_bytes(_ID_CHARS + 8).translate(_TO_ALPHABET, _DROPPED)
    return f"call_{index:02d}_{mark}{unique[:_ID_CHARS].decode()}"


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended.

    reason: what the backend said; a stop sequence overrides it.
    stop_sequence: the stop sequence that was matched.
    reasoning_tokens: completion tokens spent on thinking, None where nobody counted.
    server_tool_use: how often the server ran tools of its own, by kind; None where it has none.
    paused: whether the model wanted to go on, but the server's tools were used up.
    """

    reason: InferenceFinishReason
    stop_sequence: str | None
    completion_tokens: int
    reasoning_tokens: int | None
    server_tool_use: dict[str, int] | None = None
    paused: bool = False


class ChunkGenerator(ABC, Generic[E]):
    """Base of the generators: turns the parser's report into events of one protocol.

    `out` is the list that events go to; the stream processor replaces it for every chunk.
    thinks: whether the answer should begin with thinking.
    """

    __slots__ = ("_call_ids", "_consumed", "_misses_thinking", "out", "prompt_usage")

    def __init__(self, call_ids: CallIds | None, *, thinks: bool = False) -> None:
        self._misses_thinking = thinks
        """Whether thinking was wanted and has not come; `reasoning` makes it false."""
        self.out: list[E] = []
        self.prompt_usage = PromptUsage()
        self._call_ids = call_ids
        self._consumed = False

    def call_id(self, number: int) -> str:
        """The id of a new call. A random one tells, as the reference's does, of no thinking."""
        if self._call_ids is not None:
            return self._call_ids(number)
        return random_call_id(number, after_thinking=not self._misses_thinking)

    def consume(self) -> None:
        """Mark the generator as used. Raises `StreamError` the second time."""
        if self._consumed:
            raise StreamError("this generator already belongs to another processor; make a new one")
        self._consumed = True

    @abstractmethod
    def start(self, usage: PromptUsage, fingerprint: str | None) -> None:
        """The backend is ready."""

    @abstractmethod
    def reasoning(self, text: str) -> None:
        """More of the thinking."""

    @abstractmethod
    def content(self, text: str) -> None:
        """More of the answer."""

    def reasoning_with_logprobs(self, text: str, entries: list[dict[str, Any]]) -> None:
        """More of the thinking, with an entry for each token that spells it."""
        self.reasoning(text)

    def content_with_logprobs(self, text: str, entries: list[dict[str, Any]]) -> None:
        """More of the answer, with an entry for each token that spells it."""
        self.content(text)

    @abstractmethod
    def call_started(self, name: str) -> None:
        """A tool call begins."""

    @abstractmethod
    def call_arguments(self, piece: str, raw: str | None = None) -> None:
        """More of the arguments' JSON; `raw` is the piece unescaped, inside a string value."""

    def call_arguments_with_logprobs(
        self, piece: str, raw: str | None, entries: list[dict[str, Any]]
    ) -> None:
        """More of the arguments, with an entry for each token that spells it."""
        self.call_arguments(piece, raw)

    def call_ended(self, meant: str | None = None) -> None:
        """The current call is complete; `meant` are its arguments if others were written."""
        return

    def insert(self, block: Mapping[str, Any]) -> None:
        """A complete content block or output item of a server tool, as it is."""
        raise StreamError(f"{type(self).__name__} has no place for server tools")

    @abstractmethod
    def end(self, ending: Ending) -> None:
        """The answer is over."""
