"""Identity of cached state: everything that changes the bytes, or the right to see them, is hashed.

fingerprint = blake3(derive_key_context="kvtier v1 fingerprint", canonical JSON)
root        = blake3(key=secret, fingerprint || u32le(len(salt)) || salt)
h[i]        = blake3(key=secret, h[i-1] || u32le tokens of block i || media of block i)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deepinfer_kvtier.base import native
from deepinfer_kvtier.base.errors import ConfigError, UncacheableInput
from deepinfer_kvtier.base.values import LayoutSpec

IDENTITY_VERSION = 1
DIGEST_BYTES = 32
SECRET_BYTES = 32
_COMPILED_BYTES = 992  # of a block: with the digest before it, what BLAKE3 hashes without a tree

TokenIds = Sequence[int] | NDArray[Any]


@dataclass(frozen=True, slots=True)
class Shard:
    """Which share of sharded state this is; a hit needs the same shard of the same split."""

    index: int = 0
    count: int = 1
    axis: str = ""

    def __post_init__(self) -> None:
        if not (0 <= self.index < self.count <= 256):
            raise ConfigError(
                f"a shard needs 0 <= index < count <= 256, got index {self.index} of {self.count}"
            )


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or other media span inside the token sequence.

    start, length: placeholder slots `start .. start + length - 1`, in tokens of the whole sequence.
    digest:        32 bytes over the preprocessed content and the processor version. None means the
                   content is unknown: every use raises UncacheableInput.
    kind:          small number that tells kinds of media apart.
    item_offset:   offset of the first slot inside the item, for the later tiles of a split image.
    """

    start: int
    length: int
    digest: bytes | None
    kind: int = 0
    item_offset: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.kind <= 255 and 0 <= self.item_offset < 1 << 31 and self.length >= 1):
            raise ConfigError(
                "a media item needs kind 0..255, length >= 1 and item_offset 0..2**31 - 1, got"
                f" kind {self.kind}, length {self.length}, item_offset {self.item_offset}"
            )

    def checked_digest(self) -> bytes:
        """The digest, or UncacheableInput where it is missing or has been cut."""
        if self.digest is None or len(self.digest) != DIGEST_BYTES:
            got = "none" if self.digest is None else f"{len(self.digest)} bytes"
            raise UncacheableInput(
                f"media at tokens {self.start}..{self.start + self.length - 1} needs a"
                f" {DIGEST_BYTES}-byte content digest, got {got}; hash the preprocessed content"
                " or skip the cache"
            )
        return self.digest


def fingerprint(
    *,
    model: str | Mapping[str, Any],
    layout: LayoutSpec,
    adapters: Sequence[Mapping[str, Any]] = (),
    quantisation: Mapping[str, Any] | None = None,
    rope: Mapping[str, Any] | None = None,
    numerics: str = "",
    shard: Shard | None = None,
    tables: Mapping[str, Any] | None = None,
) -> bytes:
    """32 bytes over everything but tokens and tenant that decides the cached bytes.

    model:    id or a mapping with id, config digest and weight-index digest.
    numerics: kernel family ("torch-cpu") or a class name for families proven equal.
    raises:   ConfigError where a value is not plain JSON.
    """
    shard = shard or Shard()
    if not isinstance(model, (str, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"model is an id or a mapping, got {type(model).__name__}")
    try:
        named = {
            "adapters": [dict(adapter) for adapter in adapters],
            "quantisation": dict(quantisation or {}),
            "rope": dict(rope or {}),
            "tables": dict(tables or {}),
        }
    except (TypeError, ValueError) as cause:
        raise ConfigError(
            "adapters is a sequence of mappings; quantisation, rope and tables are mappings:"
            f" {cause}"
        ) from None
    canonical = {
        **named,
        "identity_version": IDENTITY_VERSION,
        "layout": layout.canonical(),
        "model": model if isinstance(model, str) else dict(model),
        "numerics": numerics,
        "shard": [shard.index, shard.count, shard.axis],
    }
    try:
        text = json.dumps(
            canonical, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()
    except (TypeError, ValueError) as cause:
        raise ConfigError(
            f"the identity of a namespace must be plain JSON values: {cause}"
        ) from cause
    hasher = blake3(derive_key_context=f"kvtier v{IDENTITY_VERSION} fingerprint")
    return hasher.update(text).digest()


def chain_root(secret: bytes, fingerprint_: bytes, salt: bytes) -> bytes:
    """h[0]: where the chain of one namespace and tenant starts."""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"the store secret must be {SECRET_BYTES} bytes, got {len(secret)}")
    return blake3(fingerprint_ + struct.pack("<I", len(salt)) + salt, key=secret).digest()


def salt_bytes(salt: str | bytes) -> bytes:
    """The tenant's salt as it is hashed. raises: ConfigError for what is no text and no bytes.

    `bytes(5)` would be five zeros and `bytes(0)` the scope all tenants share: a tenant's number is
    refused, not converted.
    """
    if isinstance(salt, bytes):
        return salt
    if not isinstance(salt, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"a salt is text or bytes, got {type(salt).__name__}")
    try:
        return salt.encode()
    except UnicodeEncodeError as cause:
        raise ConfigError(f"a salt must be valid Unicode: {cause.reason}") from cause


def token_buffer(tokens: TokenIds) -> NDArray[np.uint32]:
    """Token ids as a little-endian uint32 array; ConfigError for ids outside 0 .. 2**32 - 1."""
    try:
        array: NDArray[Any] = np.asarray(tokens)
    except ValueError as cause:
        raise ConfigError(f"tokens must be a flat sequence of integers: {cause}") from cause
    if array.size == 0:
        return np.empty(0, dtype="<u4")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"tokens must be a flat sequence of integers, got shape {array.shape} of {array.dtype}"
        )
    signed = array.dtype == np.int64
    if signed:
        array = array.view(np.uint64)  # the negative ones are the largest then: one look is enough
    if array.dtype != np.uint32:
        low, high = int(array.min()) if array.dtype.kind == "i" else 0, int(array.max())
        if low < 0 or high > 0xFFFFFFFF:
            high -= signed * (high >> 63 << 64)
            raise ConfigError(
                f"token ids must be in 0 .. 2**32 - 1, got {low if low < 0 else high}"
            )
    return np.ascontiguousarray(array, dtype="<u4")


class ChainDigests(tuple[bytes, ...]):
    """Digests of consecutive blocks of one chain, which know where in it they lie.

    first_block: position of the first of them. before: digest of the block before it, or the root.
    """

    first_block: int
    before: bytes

    @classmethod
    def at(cls, digests: Iterable[bytes], first_block: int, before: bytes) -> ChainDigests:
        """These digests, at that place."""
        made = cls(digests)
        made.first_block, made.before = first_block, before
        return made

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> bytes: ...

    @overload
    def __getitem__(self, key: slice, /) -> tuple[bytes, ...]: ...

    def __getitem__(self, key: SupportsIndex | slice, /) -> bytes | tuple[bytes, ...]:
        """A part of them knows its place, too, unless it leaves some out."""
        if not isinstance(key, slice):
            return super().__getitem__(key)
        found = super().__getitem__(key)
        if (key.step or 1) != 1:
            return found
        start = key.indices(len(self))[0]
        before = super().__getitem__(start - 1) if start else self.before
        return ChainDigests.at(found, self.first_block + start, before)


class ChainHasher:
    """Hashes a growing sequence once: `extend` costs only its new blocks.

    Only whole blocks get a digest; the tokens after the last boundary wait for the next `extend`.
    A media item must be given no later than the tokens of the block it starts in.
    """

    def __init__(self, secret: bytes, root: bytes, block_tokens: int) -> None:
        self._secret = secret
        self._block_tokens = block_tokens
        self._root = root
        self._digests: list[bytes] = []
        self._tail: NDArray[np.uint32] = np.empty(0, dtype="<u4")
        self._media: list[MediaItem] = []

    @property
    def root(self) -> bytes:
        """h[0], the parent of the first block."""
        return self._root

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Digests (32 bytes each) of all whole blocks so far, first to last."""
        return ChainDigests.at(self._digests, 0, self._root)

    @property
    def n_tokens(self) -> int:
        """Tokens seen so far, the unhashed tail included."""
        return len(self._digests) * self._block_tokens + len(self._tail)

    def parent_of(self, block: int) -> bytes:
        """Digest of the block before `block`; the root for block 0."""
        return self._root if block == 0 else self._digests[block - 1]

    def extend(self, tokens: TokenIds, media: Iterable[MediaItem] = ()) -> tuple[bytes, ...]:
        """Append tokens and return the digests of the blocks they complete: `put` takes them.

        raises: ConfigError for bad ids or for media inside blocks already hashed,
                UncacheableInput for media without a digest.
        """
        new_media = list(media) if isinstance(media, Iterable) else [media]  # pyright: ignore[reportUnnecessaryIsInstance]
        if not all(isinstance(item, MediaItem) for item in new_media):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"media is a sequence of MediaItem, got {media!r}")
        new_media.sort(key=lambda item: item.start)
        hashed_tokens = len(self._digests) * self._block_tokens
        for item in new_media:
            item.checked_digest()
            if item.start < hashed_tokens:
                raise ConfigError(
                    f"media must start at or after token {hashed_tokens}, the first one not hashed"
                    f" yet; got start {item.start}"
                )
        fresh = token_buffer(tokens)
        pending = np.concatenate((self._tail, fresh)) if len(self._tail) else fresh
        self._media = sorted((*self._media, *new_media), key=lambda item: item.start)
        size = self._block_tokens
        n_new = len(pending) // size
        raw = pending[: n_new * size].view(np.uint8).data
        before = self._digests[-1] if self._digests else self._root
        if native.routines is not None and not self._media and 4 * size <= _COMPILED_BYTES:
            new = native.routines.chain_digests(self._secret, before, raw, 4 * size)
        else:
            new = self._hash(before, raw, hashed_tokens)
        first = len(self._digests)
        self._digests.extend(new)
        self._tail = pending[n_new * size :].copy()
        done = hashed_tokens + n_new * size
        self._media = [item for item in self._media if item.start + item.length > done]
        return ChainDigests.at(new, first, before)

    def fork(self) -> ChainHasher:
        """An independent continuation from here, for branches of one conversation."""
        twin = ChainHasher(self._secret, self._root, self._block_tokens)
        twin._digests = list(self._digests)
        twin._tail = self._tail
        twin._media = list(self._media)
        return twin

    def _hash(self, digest: bytes, raw: memoryview, start: int) -> list[bytes]:
        """Digests of blocks, with their media. Without any: pure form of `chain_digests`."""
        size = self._block_tokens
        hasher = blake3(key=self._secret)  # one for all blocks: making it costs as much as a block
        new: list[bytes] = []
        for at in range(0, len(raw), 4 * size):
            hasher.reset()
            hasher.update(digest + raw[at : at + 4 * size])
            if self._media:
                hasher.update(self._extras(start + at // 4))
            digest = hasher.digest()
            new.append(digest)
        return new

    def _extras(self, block_start: int) -> bytes:
        block_end = block_start + self._block_tokens
        extras = b""
        for item in self._media:
            first = max(item.start, block_start)
            last = min(item.start + item.length, block_end)
            if first < last:
                extras += struct.pack(
                    "<BHHI",
                    item.kind,
                    first - block_start,
                    last - first,
                    item.item_offset + first - item.start,
                )
                extras += item.checked_digest()
        return extras


def namespace_tag(root: bytes) -> int:
    """Short name of a namespace in records on disk: tells tenants apart, reveals nothing."""
    return int.from_bytes(root[:4], "big")


def check_digests(digests: Iterable[bytes]) -> None:
    """raises: ConfigError unless every digest is 32 bytes."""
    digests = list(digests)
    if set(map(type, digests)) <= {bytes} and set(map(len, digests)) <= {DIGEST_BYTES}:
        return
    for digest in digests:
        if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"a digest is {DIGEST_BYTES} bytes, got {digest!r}")
