"""Pictures of a prompt: how many tokens one takes, and where they are.

A picture of `rows x columns` cells spans `rows * (columns + 1) + 2` tokens of the prompt:

    START  (CELL * columns  NEWLINE) * rows  END

All of them carry the model's image token id; what they are follows from the picture's size. A cell
is `cell` x `cell` patches of `patch` x `patch` pixels. Standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deepinfer_engine.errors import RequestError

_PROCESSOR = b"deepinfer picture v1"
"""Enters every digest: change it when the same pixels would give other embeddings."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a prompt, ready for the tower.

    start, length: its tokens are `start .. start + length - 1` of the prompt.
    width, height: of the pixels, multiples of the patch.
    digest: 32 bytes that stand for pixels and size; prompt caches tell pictures apart by it.
    pixels: RGB, one byte a channel, row by row, `3 * width * height` bytes. Empty where the
        prompt's cache was computed elsewhere (a decode worker).
    rows: embeddings of its tokens, as `RowForm` has them, where an encode worker has computed
        them; the pixels are then not read.
    """

    start: int
    length: int
    width: int
    height: int
    digest: bytes
    pixels: bytes = field(repr=False)
    rows: memoryview | None = field(default=None, repr=False, compare=False)

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class PictureRules:
    """What a prompt's pictures must be like for one model."""

    image_token_id: int
    patch: int = 14
    cell: int = 3
    max_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None
    channels: int = 0
    """Of one token's embedding; 0 where the family does not say, and no other worker can encode."""

    def tokens(self, width: int, height: int) -> int:
        """Tokens that a picture of this size, in whole patches, spans.

        The last row and column of cells may lie over the picture's edge.
        """
        rows = -(-(height // self.patch) // self.cell)
        columns = -(-(width // self.patch) // self.cell)
        return rows * (columns + 1) + 2

    def check(self, pictures: Sequence[Picture], tokens: Sequence[int]) -> None:
        """Raise RequestError unless these pictures can be computed in this prompt."""
        free = 0
        for i, picture in enumerate(pictures):
            if picture.start < free or picture.length < 1 or picture.end > len(tokens):
                raise RequestError(
                    f"picture {i} spans tokens {picture.start} .. {picture.end - 1}; pictures "
                    f"stand in order, apart, and inside the {len(tokens)} tokens of the prompt"
                )
            free = picture.end
            if any(t != self.image_token_id for t in tokens[picture.start : picture.end]):
                raise RequestError(
                    f"every token of picture {i} must be the image token {self.image_token_id}"
                )
            self.check_size(i, picture.width, picture.height, picture.length)
            size = 3 * picture.width * picture.height
            if len(picture.pixels) != size:
                raise RequestError(
                    f"picture {i} of {picture.width} x {picture.height} pixels has {size} bytes, "
                    f"got {len(picture.pixels)}"
                )

    def check_size(self, i: int, width: int, height: int, length: int) -> None:
        """Raise RequestError unless picture `i` of this size may be, and spans `length` tokens."""
        whole = width > 0 and height > 0 and not width % self.patch and not height % self.patch
        if not whole or self.tokens(width, height) > self.max_tokens:
            raise RequestError(
                f"picture {i} has {width} x {height} pixels; wanted whole patches of "
                f"{self.patch} x {self.patch} and at most {self.max_tokens} tokens"
            )
        if length != self.tokens(width, height):
            raise RequestError(
                f"picture {i} of {width} x {height} pixels takes {self.tokens(width, height)} "
                f"tokens, and its span has {length}"
            )


@dataclass(frozen=True, slots=True)
class RowForm:
    """How embeddings of one model's pictures lie in memory: rows of `channels` numbers."""

    rules: PictureRules
    dtype: str
    """float32, float64 or bfloat16; little endian."""
    model: str | None = None
    """A digest of the checkpoint."""

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        return self.rules.channels * _ITEM_BYTES[self.dtype]

    @property
    def version(self) -> str:
        """Equal where the same pixels give the same rows: preprocessing, weights, arithmetic."""
        text = f"{_PROCESSOR!r}/{self.rules}/{self.dtype}/{self.model}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


def picture_digest(width: int, height: int, pixels: bytes) -> bytes:
    """32 bytes (BLAKE2b) over the processor's version, the size and the pixels."""
    digest = hashlib.blake2b(_PROCESSOR, digest_size=32)
    digest.update(f"/{width}x{height}/".encode())
    digest.update(pixels)
    return digest.digest()


def place(
    token_ids: Sequence[int],
    images: Sequence[tuple[int, int, bytes]],
    rules: PictureRules,
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Expand one placeholder a picture to its span.

    token_ids: the prompt, with one `image_token_id` for each image, in order.
    images: (width, height, RGB pixels), sizes in whole patches.

    Raises RequestError when the counts differ.
    """
    found = sum(t == rules.image_token_id for t in token_ids)
    if found != len(images):
        raise RequestError(
            f"the prompt has {found} image placeholders (token {rules.image_token_id}) and "
            f"{len(images)} pictures; wanted one placeholder for each picture"
        )
    out: list[int] = []
    pictures: list[Picture] = []
    waiting = iter(images)
    for token in token_ids:
        if token != rules.image_token_id:
            out.append(token)
            continue
        width, height, pixels = next(waiting)
        length = rules.tokens(width, height)
        digest = picture_digest(width, height, pixels)
        pictures.append(Picture(len(out), length, width, height, digest, pixels))
        out += [token] * length
    return tuple(out), tuple(pictures)


def overlapping(pictures: Iterable[Picture], start: int, end: int) -> tuple[Picture, ...]:
    """The pictures with a token in `[start, end)`."""
    return tuple(p for p in pictures if max(p.start, start) < min(p.end, end))


def text_only(tokens: Sequence[int], first: int, pictures: Iterable[Picture]) -> tuple[int, ...]:
    """`tokens`, which stand from position `first` on, with -1 for every token of a picture."""
    out = list(tokens)
    for picture in overlapping(pictures, first, first + len(out)):
        for position in range(max(picture.start, first), min(picture.end, first + len(out))):
            out[position - first] = -1
    return tuple(out)
