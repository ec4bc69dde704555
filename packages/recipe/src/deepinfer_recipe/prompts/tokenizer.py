"""Tokenizers: text to ids with and without the added vocabulary, and ids back to text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_recipe.base.errors import EncodeError

if TYPE_CHECKING:
    import tokenizers


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable character; this is the way back.

    Printable Latin-1 bytes stand for themselves, the others for U+0100 onwards, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = {**dict.fromkeys(range(256), 0xFFFF), **str.maketrans(_byte_alphabet())}
"""For `str.translate`: a byte for each character of the alphabet, nothing of Latin-1 for others."""


def _backend() -> Any:
    # Loaded on first use: importing the package must stay cheap.
    import tokenizers

    return tokenizers.Tokenizer


_LONG = 16 * 1024
"""Characters from which a text is encoded with the interpreter's lock released."""


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    if len(text) < _LONG:
        return backend.encode(text, add_special_tokens=False).ids
    # `encode` holds the lock to its end, seconds for a text of megabytes, and no other thread of a
    # server would answer meanwhile; a batch does not, and this one leaves out the offsets.
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids


class Tokenizer:
    """A Hugging Face tokenizer loaded from a `tokenizer.json` file.

    A prompt encoding uses it, after `with_tokenizer`, to encode conversations into token ids.
    A stream processor uses it to decode the token ids of `tokens` inference chunks.
    """

    __slots__ = ("_added", "_full", "_plain", "_specials")

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Wrap a `tokenizers.Tokenizer`; it must not be changed afterwards."""
        self._full = backend
        self._plain: tokenizers.Tokenizer | None = None
        self._specials: dict[str, int] = {}
        self._added: dict[int, str] = {}

    @staticmethod
    def from_file(path: str) -> Tokenizer:
        """Load a tokenizer from a `tokenizer.json` file."""
        return Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))

    @staticmethod
    def from_str(text: str) -> Tokenizer:
        """Load a tokenizer from the contents of a `tokenizer.json` file.

        Raises `ValueError` if the text is not one.
        """
        try:
            return Tokenizer(_backend().from_str(text))
        except Exception as error:  # the backend raises bare Exception
            raise ValueError(f"not a tokenizer.json: {error}") from error

    @staticmethod
    def from_pretrained(
        identifier: str, revision: str | None = None, token: str | None = None
    ) -> Tokenizer:
        """Download and cache `tokenizer.json` from the Hugging Face Hub."""
        loaded = _backend().from_pretrained(identifier, revision=revision or "main", token=token)
        return Tokenizer(loaded)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The wrapped tokenizer."""
        return self._full

    def encode(self, text: str) -> list[int]:
        """Encode `text` into token ids with the full vocabulary, including the added one.

        A special-token spelling in `text` encodes as that token's id. The post-processor adds
        no special tokens, such as a BOS token. This is not prompt encoding.
        """
        return _ids(self._full, text)

    def encode_plain(self, text: str) -> list[int]:
        """Encode `text` without the added vocabulary: what spells a special token stays text."""
        if self._plain is None:
            self._plain = self._without_added_vocabulary()
        return _ids(self._plain, text)

    def _without_added_vocabulary(self) -> tokenizers.Tokenizer:
        spec = json.loads(self._full.to_str())
        spec["added_tokens"] = []
        spec["post_processor"] = None
        spec["truncation"] = None
        spec["padding"] = None
        return _backend().from_str(json.dumps(spec))

    def special_id(self, spelling: str) -> int:
        """Id of an added token. Raises `EncodeError` if the vocabulary lacks it."""
        self._read_added()
        try:
            return self._specials[spelling]
        except KeyError:
            raise EncodeError(
                f'special token "{spelling}" is not in the added vocabulary of the tokenizer; '
                "attach the tokenizer that belongs to this prompt format"
            ) from None

    def _read_added(self) -> None:
        if not self._added:
            added = self._full.get_added_tokens_decoder()
            self._added = {index: token.content for index, token in added.items()}
            self._specials = {content: index for index, content in self._added.items()}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters.

        Raises `EncodeError` for an id outside the vocabulary or a vocabulary that is not
        byte-level BPE.
        """
        self._read_added()
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._full.id_to_token(token_id)
        if token is None:
            raise EncodeError(f"token id {token_id} is not in the vocabulary of the tokenizer")
        try:
            return token.translate(_BYTE_OF).encode("latin-1")
        except UnicodeEncodeError:
            raise EncodeError(
                f"token {token!r} is not byte-level: only byte-level BPE tokenizers decode"
            ) from None

    def encode_prompt(self, text: str, special_ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Encode text whose `special_ranges` (code points) hold one special token each.

        The text between the ranges is encoded without the added vocabulary, each piece on its
        own, so nothing a user typed can become a special token.
        """
        ids: list[int] = []
        position = 0
        for start, end in special_ranges:
            if start > position:
                ids += self.encode_plain(text[position:start])
            ids.append(self.special_id(text[start:end]))
            position = end
        if position < len(text):
            ids += self.encode_plain(text[position:])
        return ids
