"""Sealed reasoning: what a stateless client carries from turn to turn and cannot read or change.

AES-GCM with a random 96-bit nonce (NIST SP 800-38D). A sealed text is

    dr1.<key id>.<base64url of nonce, ciphertext and tag>

and is bound to its key id and to an audience, so that it opens only for whom it was made.
Needs `cryptography`: the extra `sealed`.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepinfer_recipe.base.errors import MissingExtraError, SealError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PREFIX = "dr1."
_NONCE_BYTES = 12
_TAG_BYTES = 16
_KEY_BYTES = (16, 24, 32)
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,32}\Z")


def _cipher(key: bytes) -> AESGCM:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise MissingExtraError("sealing reasoning", "sealed", "cryptography") from None
    return AESGCM(key)


class ReasoningSealer:
    """Seals and opens texts with named keys.

    keys: key id -> 16, 24 or 32 secret bytes. Texts are sealed with the first; all of them open,
        so a key is replaced by putting the new one before it.
    audience: for whom texts are sealed, such as the id of an API key.
    """

    __slots__ = ("_audience", "_ciphers", "_current")

    def __init__(self, keys: Mapping[str, bytes], *, audience: str = "") -> None:
        if not keys:
            raise ValueError("a sealer needs at least one key")
        for name, key in keys.items():
            if not _KEY_ID.match(name):
                raise ValueError(f"a key id is 1-32 letters, digits, _ or -, got {name!r}")
            if len(key) not in _KEY_BYTES:
                raise ValueError(f"key {name}: expected 16, 24 or 32 bytes, got {len(key)}")
        self._ciphers = {name: _cipher(key) for name, key in keys.items()}
        self._current = next(iter(keys))
        self._audience = audience

    @staticmethod
    def from_text(text: str) -> ReasoningSealer:
        """From `id:base64key`, several with commas between them: what fits in one variable."""
        keys: dict[str, bytes] = {}
        for number, entry in enumerate(text.split(","), start=1):
            name, colon, encoded = entry.strip().partition(":")
            try:
                key = base64.b64decode(encoded, validate=True)
            except (binascii.Error, ValueError):
                key = b""
            # The text is a secret: an error must not repeat it.
            if not colon or not key:
                raise ValueError(f"key {number}: expected `id:base64 of 16, 24 or 32 bytes`")
            if name in keys:
                raise ValueError(f"key {number}: the id {name!r} is there twice")
            keys[name] = key
        return ReasoningSealer(keys)

    def for_audience(self, audience: str) -> ReasoningSealer:
        """The same keys, for another audience."""
        sealer = ReasoningSealer.__new__(ReasoningSealer)
        sealer._ciphers, sealer._current = self._ciphers, self._current
        sealer._audience = audience
        return sealer

    def _bound_to(self, key_id: str) -> bytes:
        return f"{PREFIX}{key_id}\0{self._audience}".encode()

    def seal(self, text: str) -> str:
        """Seal a text; every time with another result."""
        nonce = os.urandom(_NONCE_BYTES)
        key_id = self._current
        sealed = self._ciphers[key_id].encrypt(nonce, text.encode(), self._bound_to(key_id))
        return f"{PREFIX}{key_id}.{base64.urlsafe_b64encode(nonce + sealed).decode()}"

    def open(self, sealed: str) -> str:
        """The text. Raises `SealError` for another key or audience, or a changed text."""
        from cryptography.exceptions import InvalidTag

        key_id, dot, encoded = sealed.removeprefix(PREFIX).partition(".")
        if not sealed.startswith(PREFIX) or not dot:
            raise SealError(f"expected a text sealed by this server (`{PREFIX}...`)")
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise SealError(f"it is sealed with a key that is not known here: {key_id[:32]!r}")
        try:
            data = base64.b64decode(encoded.encode("ascii"), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise SealError("it was changed: its body is not base64") from None
        if len(data) < _NONCE_BYTES + _TAG_BYTES:
            raise SealError("it was changed: it is cut short")
        try:
            plain = cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], self._bound_to(key_id))
        except InvalidTag:
            raise SealError("it was changed, or sealed for somebody else") from None
        return plain.decode()

    def __repr__(self) -> str:
        return f"ReasoningSealer(keys={list(self._ciphers)}, audience={self._audience!r})"
