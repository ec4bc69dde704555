"""Keys of one connection, and the frames they seal.

Both sides contribute a nonce and an ephemeral X25519 key; the cluster key goes into the derivation
as a pre-shared secret, and the two HELLO bodies (version, role, epoch, nonce, public key of each)
as its context. So the keys of a connection are known to nobody who lacks the cluster key, differ
with every connection, and fit no frame of another version, role or run of a worker. What was
recorded cannot be read with a cluster key that leaks later.

A frame is sealed with AES-256-GCM under its direction's key. Its header is authenticated with it,
and its sequence number is the nonce: a frame that is changed, repeated, reordered or left out ends
the connection.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher as Stream
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from deepinfer_engine.errors import TransferError

PUBLIC_BYTES = 32
_INFO = b"deepinfer worker link, protocol 2"
_TAG_BYTES = 16
_NONCE = struct.Struct("<4xQ")


class Opening:
    """A frame that is opened piece by piece. What came of it counts once `end` agrees."""

    __slots__ = ("_at", "_body", "_context")

    def __init__(self, key: AES, seq: int, header: bytes, body: memoryview) -> None:
        if len(body) < _TAG_BYTES:
            raise _changed()
        self._context = Stream(key, GCM(_NONCE.pack(seq))).decryptor()
        self._context.authenticate_additional_data(header)
        self._body = body
        self._at = 0

    def read(self, target: memoryview) -> None:
        """The next bytes, as many as fit the target."""
        end = self._at + len(target)
        self._context.update_into(self._body[self._at : end], target)
        self._at = end

    def end(self) -> None:
        """All but the tag was read. TransferError unless it was what the peer sealed."""
        try:
            self._context.finalize_with_tag(bytes(self._body[self._at :]))
        except InvalidTag:
            raise _changed() from None


class Cipher:
    """One direction of one connection."""

    __slots__ = ("_aead", "_key")

    def __init__(self, key: bytes) -> None:
        self._aead, self._key = AESGCM(key), AES(key)

    def seal(self, seq: int, header: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
        """The body of frame `seq`, `wire.TAG_BYTES` longer than the parts together."""
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._aead.encrypt(_NONCE.pack(seq), body, header)

    def open(self, seq: int, header: bytes, body: bytes | memoryview) -> memoryview:
        """What was sealed. TransferError for anything else."""
        try:
            return memoryview(self._aead.decrypt(_NONCE.pack(seq), body, header))
        except InvalidTag:
            raise _changed() from None

    def seal_into(
        self, seq: int, header: bytes, parts: Sequence[bytes | memoryview], target: memoryview
    ) -> None:
        """As `seal`, into memory of just its length: no part is copied before."""
        context = Stream(self._key, GCM(_NONCE.pack(seq))).encryptor()
        context.authenticate_additional_data(header)
        at = 0
        for part in parts:
            at += context.update_into(part, target[at:])
        context.finalize()
        target[at:] = context.tag

    def opening(self, seq: int, header: bytes, body: memoryview) -> Opening:
        """The same, piece by piece, into memory that is there."""
        return Opening(self._key, seq, header, body)


def _changed() -> TransferError:
    return TransferError(
        "a frame is not what the peer sealed: another cluster key, or somebody between"
    )


class KeyAgreement:
    """This side's half of the handshake; used once."""

    def __init__(self, cluster_key: bytes) -> None:
        self._cluster_key = cluster_key
        self._private = X25519PrivateKey.generate()

    @property
    def public(self) -> bytes:
        return self._private.public_key().public_bytes_raw()

    def ciphers(
        self, their_public: bytes, accept_hello: bytes, connect_hello: bytes
    ) -> tuple[Cipher, Cipher]:
        """(of the connecting side's frames, of the accepting side's). The bodies are those that
        travelled, byte for byte. Raises TransferError for a public key that is none."""
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(their_public))
        except ValueError:
            raise TransferError("the peer's public key is unusable") from None
        context = hashlib.sha256(
            len(accept_hello).to_bytes(8, "little") + accept_hello + connect_hello
        ).digest()
        keys = HKDF(algorithm=hashes.SHA256(), length=64, salt=context, info=_INFO).derive(
            shared + self._cluster_key
        )
        return Cipher(keys[:32]), Cipher(keys[32:])
