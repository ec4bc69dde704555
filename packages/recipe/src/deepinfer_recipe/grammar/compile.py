"""Grammars at work: compiled by xgrammar for one vocabulary, walked token by token.

Importing this module is cheap; using it loads xgrammar, which loads torch. What a grammar allows at
a place is found when a walk first comes there and kept for the next: computed in advance for all
places, the calls of 24 tools take 1.3 CPU seconds and 7 MiB over a vocabulary of 129,280 tokens,
of which an answer visits few.
"""

from __future__ import annotations

import contextlib
import json
import struct
from array import array
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_recipe.base.errors import EncodeError, GrammarError
from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.conversation.special_tokens import (
    DEFAULT_SPECIAL_TOKENS,
    SpecialToken,
    SpecialTokens,
)
from deepinfer_recipe.grammar.formats import token
from deepinfer_recipe.grammar.library import library
from deepinfer_recipe.prompts.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    MaskRow = npt.NDArray[np.int32]


class GrammarVocabulary:
    """A tokenizer as grammars see it: the bytes of every token.

    Added tokens have none, so no text can hold them, but for the two that answers are built
    with: the mark of tool calls and the end of thinking.
    """

    __slots__ = ("info", "packed", "think_end", "think_end_id")

    def __init__(self, packed: bytes) -> None:
        """`packed` is what `_pack` made."""
        (size,) = _HEAD.unpack_from(packed)
        head = json.loads(packed[_HEAD.size : _HEAD.size + size])
        self.packed = packed
        self.think_end: str = head["think_end"]
        self.think_end_id: int = head["think_end_id"]
        self.info: Any = library().TokenizerInfo(
            _spellings(packed, _HEAD.size + size, head["count"]),
            library().VocabType.RAW,
            vocab_size=head["vocab_size"],
            stop_token_ids=head["ends"],
        )
        """The library's own `TokenizerInfo`."""

    def serialize(self) -> bytes:
        """Bytes that `deserialize` reads, in another process too."""
        return self.packed

    @staticmethod
    def deserialize(data: bytes) -> GrammarVocabulary:
        """What `serialize` wrote."""
        return GrammarVocabulary(data)

    @staticmethod
    def of(
        tokenizer: Tokenizer,
        *,
        vocab_size: int | None = None,
        stop_token_ids: Collection[int] = (),
        special_tokens: SpecialTokens = DEFAULT_SPECIAL_TOKENS,
        marks: Collection[str] | None = None,
    ) -> GrammarVocabulary:
        """The vocabulary of a tokenizer.

        marks: spellings of the added tokens that answers are built with, for models with a chat
            template (whose end tokens must be named in `stop_token_ids`); those that the
            vocabulary lacks are passed over.

        vocab_size: width of the logits, where it differs from the tokenizer's size.
        stop_token_ids: tokens that may end an answer beside the end-of-sentence token.
        """
        size = tokenizer.backend.get_vocab_size(with_added_tokens=True)
        added = tokenizer.backend.get_added_tokens_decoder()
        think_end = special_tokens.token(SpecialToken.ThinkingEnd)
        shown = {special_tokens.token(SpecialToken.Dsml), think_end}
        if marks is not None:
            shown = set(marks)
        spellings = [
            tokenizer.token_bytes(index)
            if index not in added or added[index].content in shown
            else b""
            for index in range(size)
        ]
        ends = set(stop_token_ids)
        if marks is None:
            ends.add(tokenizer.special_id(special_tokens.token(SpecialToken.Eos)))
        think_end_id = -1
        if marks is None or think_end in marks:
            with contextlib.suppress(*((EncodeError,) if marks is not None else ())):
                think_end_id = tokenizer.special_id(think_end)
        head = {
            "count": len(spellings),
            "vocab_size": vocab_size or size,
            "ends": sorted(ends),
            "think_end": think_end,
            "think_end_id": think_end_id,
        }
        return GrammarVocabulary(_pack(head, spellings))

    @property
    def size(self) -> int:
        """Width of the logits."""
        return int(self.info.vocab_size)

    @property
    def mask_words(self) -> int:
        """int32 words of a mask row: bit `i` of word `w` is token `32 w + i`."""
        return -(-self.size // 32)


_HEAD = struct.Struct("<I")
"""Length of the JSON in front; then come the lengths of all spellings as u32, then their bytes."""


def _pack(head: dict[str, Any], spellings: Sequence[bytes]) -> bytes:
    text = json.dumps(head).encode()
    lengths = array("I", map(len, spellings))
    return b"".join((_HEAD.pack(len(text)), text, lengths.tobytes(), *spellings))


def _spellings(packed: bytes, start: int, count: int) -> list[bytes]:
    lengths = array("I")
    at = start + count * lengths.itemsize
    lengths.frombytes(packed[start:at])
    out: list[bytes] = []
    for length in lengths:
        out.append(packed[at : at + length])
        at += length
    return out


class CompiledGrammar:
    """A grammar ready for one vocabulary. Immutable; any number of matchers may walk it."""

    __slots__ = ("_grammar", "_thinks", "vocabulary")

    def __init__(self, grammar: Any, vocabulary: GrammarVocabulary, *, thinks: bool) -> None:
        """`thinks`: whether answers begin with thinking."""
        self._grammar = grammar
        self._thinks = thinks
        self.vocabulary = vocabulary

    @property
    def nbytes(self) -> int:
        """About how much memory it takes, with what walks have found so far."""
        return int(self._grammar.memory_size_bytes)

    def matcher(self, prefix: str = "", *, think_tokens: int | None = None) -> GrammarMatcher:
        """A walk from the beginning, behind `prefix`, the part of the answer that exists.

        think_tokens: behind so many tokens thinking ends, where a token says so.

        Raises `GrammarError` if no answer begins with the prefix.
        """
        walk = library().GrammarMatcher(self._grammar)
        if prefix and not walk.accept_string(prefix):
            raise GrammarError("the answer's given beginning does not fit its format")
        return GrammarMatcher(walk, self.vocabulary, thinks=self._thinks, think_tokens=think_tokens)


class GrammarMatcher:
    """A position in a grammar. Not thread-safe.

    `fill` tells the tokens that may come next, `accept` moves on, `rollback` moves back.
    """

    __slots__ = (
        *("_count", "_most_thinking", "_think_end", "_thought", "_walk", "_without_think_end"),
    )

    def __init__(
        self,
        walk: Any,
        vocabulary: GrammarVocabulary,
        *,
        thinks: bool,
        think_tokens: int | None = None,
    ) -> None:
        """`walk` is the library's matcher, at the beginning or behind a prefix."""
        self._most_thinking = think_tokens
        self._walk = walk
        self._think_end = vocabulary.think_end_id
        # Without such a token (-1) nothing is to be left out.
        word, bit = divmod(max(0, self._think_end), 32)
        keep = -1 if self._think_end < 0 else 0x7FFFFFFF if bit == 31 else ~(1 << bit)
        self._without_think_end = (word, keep)
        self._count = 0
        self._thought: int | None = None if thinks else 0
        """How many tokens there were when the thinking ended; None while it goes on."""

    @property
    def accepted(self) -> int:
        """How many tokens the walk has gone."""
        return self._count

    @property
    def terminated(self) -> bool:
        """Whether the answer is over: its end token has been accepted."""
        return bool(self._walk.is_terminated())

    @property
    def completed(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._walk.is_completed())

    def fill(self, mask: MaskRow) -> bool:
        """Write the tokens that may come next into a row of `mask_words` words.

        Returns False, and leaves the row alone, behind the end of the answer.
        """
        if self.terminated:
            return False
        self._walk.fill_next_token_bitmask(mask.reshape(1, -1))
        if self._thought is not None:
            # Strings with bounds cannot be filtered; thinking ends once all the same.
            word, keep = self._without_think_end
            mask[word] &= keep
        elif self._most_thinking is not None and self._count >= self._most_thinking:
            self._end_thinking(mask)
        return True

    def _end_thinking(self, mask: MaskRow) -> None:
        """Leave nothing but the end of thinking, where that may come."""
        word, keep = self._without_think_end
        only = int(mask[word]) & ~keep
        if self._think_end >= 0 and only:
            mask[:] = 0
            mask[word] = only

    def accept(self, token: int) -> bool:
        """Move on by one token; False, and no move, if it may not come here."""
        if self.terminated or not self._walk.accept_token(token):
            return False
        self._count += 1
        if token == self._think_end and self._thought is None:
            self._thought = self._count
        return True

    def rollback(self, count: int) -> None:
        """Move back by `count` tokens. Raises `ValueError` beyond the beginning."""
        if not 0 <= count <= self._count:
            raise ValueError(f"the walk has gone {self._count} tokens, not back by {count}")
        if count:
            self._walk.rollback(count)
            self._count -= count
            if self._thought is not None and self._thought > self._count:
                self._thought = None


def compile_grammar(
    text: str, vocabulary: GrammarVocabulary, *, ahead: bool = False
) -> CompiledGrammar:
    """Compile a structural tag.

    ahead: find what may come at every place now, not when a walk first comes there.

    Nothing bounds the time: a schema of a kilobyte can take minutes, and this call cannot be
    interrupted. Use `GrammarService` for what clients send.

    Raises GrammarError for a grammar that cannot be compiled.
    """
    compiler = library().GrammarCompiler(
        vocabulary.info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=not ahead
    )
    # Inside a JSON string the quotes would be escaped: this can only be the node itself.
    thinks = compact_json(token(vocabulary.think_end)) in text
    try:
        return CompiledGrammar(compiler.compile_structural_tag(text), vocabulary, thinks=thinks)
    except (RuntimeError, ValueError) as error:
        raise GrammarError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """The library's message without its clock and its source lines."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    _, marker, rest = line.partition(": ") if line.startswith("[") else ("", "", line)
    return f"the constraint cannot be compiled: {rest if marker or rest else line}"
