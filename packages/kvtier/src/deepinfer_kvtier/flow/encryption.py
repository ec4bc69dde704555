"""Encryption at rest: AES-256-GCM for each record, under keys that no two writers share.

namespace key = HKDF-SHA256(root key, salt = the tenant's salt, info = label | fingerprint)
record key    = HKDF-SHA256(namespace key, info = label | id of the writing cache)
nonce         = 96-bit count of the records that cache has sealed

root          = BLAKE3 keyed(namespace key, root of the same namespace in the clear)

A cache has a fresh random id each time it is opened, so a nonce never repeats under a key. Digest,
kind and depth are authenticated with the bytes. Host memory holds records in the clear.

Needs the extra [crypto].
"""

from __future__ import annotations

import itertools
import secrets
import struct
import threading
from collections.abc import Sequence
from typing import Any, Final

from blake3 import blake3

from deepinfer_kvtier.base.errors import ConfigError

KEY_BYTES: Final = 32
_TAG_BYTES = 16
_ID_BYTES = 16
_SEAL = struct.Struct("<16s16s12s20x")
SEAL_BYTES: Final = _SEAL.size
_MAX_KEYS = 1024  # record keys kept at hand; others are derived again


class WriterIdentity:
    """Who seals: one for each opened cache, shared by its namespaces."""

    def __init__(self) -> None:
        self.id = secrets.token_bytes(_ID_BYTES)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def next_nonce(self) -> bytes:
        """A nonce that was never handed out before."""
        with self._lock:
            return next(self._numbers).to_bytes(12, "little")


class Sealer:
    """Seals and opens the records of one namespace. Thread-safe.

    raises: ConfigError without the library or for a key of another length.
    """

    def __init__(
        self, root_key: bytes, *, salt: bytes, fingerprint: bytes, writer: WriterIdentity
    ) -> None:
        if not isinstance(root_key, bytes) or len(root_key) != KEY_BYTES:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = f"{len(root_key)} of " if hasattr(root_key, "__len__") else ""
            got += type(root_key).__name__
            raise ConfigError(f"an encryption key is {KEY_BYTES} bytes, got {got}")
        self._writer = writer
        self._namespace_key = _derive(root_key, salt, b"kvtier v1 namespace" + fingerprint)
        self._ciphers: dict[bytes, Any] = {}

    def bind(self, root: bytes) -> bytes:
        """The chain root of records under this key: with another key nothing is even found, so
        that what cannot be opened is stored again instead of standing in the way."""
        return blake3(root, key=self._namespace_key).digest()

    def seal(
        self, views: Sequence[memoryview], digest: bytes, kind: int, depth: int
    ) -> tuple[memoryview, bytes]:
        """The encrypted bytes, as long as the plain ones, and the 64 bytes that open them."""
        nonce = self._writer.next_nonce()
        cipher = self._cipher(self._writer.id)
        sealed = memoryview(cipher.encrypt(nonce, b"".join(views), _bound(digest, kind, depth)))
        tag = bytes(sealed[-_TAG_BYTES:])
        return sealed[:-_TAG_BYTES], _SEAL.pack(tag, self._writer.id, nonce)

    def open(
        self, views: Sequence[memoryview], seal: bytes, digest: bytes, kind: int, depth: int
    ) -> bool:
        """Decrypt in place; False, and unusable bytes, with another key or changed bytes."""
        from cryptography.exceptions import InvalidTag

        tag, writer, nonce = _SEAL.unpack(seal)
        try:
            plain = self._cipher(writer).decrypt(
                nonce, b"".join((*views, tag)), _bound(digest, kind, depth)
            )
        except InvalidTag:
            return False
        at = 0
        for view in views:
            if view.nbytes:
                view[:] = plain[at : at + view.nbytes]
            at += view.nbytes
        return True

    def _cipher(self, writer: bytes) -> Any:
        cipher = self._ciphers.get(writer)
        if cipher is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            if len(self._ciphers) >= _MAX_KEYS:
                self._ciphers.clear()
            cipher = AESGCM(_derive(self._namespace_key, b"", b"kvtier v1 record" + writer))
            self._ciphers[writer] = cipher
        return cipher


def _bound(digest: bytes, kind: int, depth: int) -> bytes:
    return digest + struct.pack("<BI", kind, depth)


def _derive(key: bytes, salt: bytes, info: bytes) -> bytes:
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ModuleNotFoundError as cause:
        raise ConfigError(
            "encryption needs cryptography: pip install './packages/kvtier[crypto]'"
        ) from cause
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt or None, info=info).derive(key)
