"""Token ids to text while they arrive: no character is shown before all its bytes are there."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence


class TokenBytes:
    """What each token id spells, as bytes, for a byte-level vocabulary."""

    def __init__(
        self, vocabulary: Mapping[str, int], added: Mapping[int, str], silent: Collection[int] = ()
    ) -> None:
        """`vocabulary` maps byte-level spellings to ids, `added` ids to plain text; `silent` ids
        spell nothing. Raises ValueError for a spelling that is not byte-level."""
        table = [b""] * (max([*vocabulary.values(), *added], default=-1) + 1)
        for spelling, token in vocabulary.items():
            if token not in added:
                try:
                    table[token] = bytes(_BYTE_OF[char] for char in spelling)
                except KeyError as exc:
                    raise ValueError(
                        f"token {token} ({spelling!r}) is not in the byte-level alphabet; only "
                        "byte-level tokenizers are served"
                    ) from exc
        for token, text in added.items():
            table[token] = b"" if token in silent else text.encode()
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def spell(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of some tokens; an id beyond the table spells nothing."""
        table = self._table
        return b"".join(table[token] if token < len(table) else b"" for token in token_ids)


class Detokeniser:
    """One answer's text. Bytes that no UTF-8 text can hold become U+FFFD."""

    def __init__(self, spelling: TokenBytes) -> None:
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is complete with these tokens; may be empty."""
        return self._decoder.decode(self._spelling.spell(token_ids))

    def finish(self) -> str:
        """What an answer cut inside a character leaves: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """The public GPT-2 mapping: printable Latin-1 stands for itself, the other bytes for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
