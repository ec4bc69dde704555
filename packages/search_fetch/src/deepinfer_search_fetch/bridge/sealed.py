"""Opaque tokens a client carries for us: AES-GCM under the server's key."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_NONCE_BYTES = 12
_MAX_PLAIN_BYTES = 4 * 1024 * 1024


class Seal:
    """Seals small JSON values so that a client can neither read nor change them.

    purpose: what the tokens are for; every purpose has a key of its own. audience: who may bring
    them back; a token sealed for another audience does not open.
    """

    def __init__(self, secret: bytes, purpose: str = "result", audience: str = "") -> None:
        if len(secret) < 16:
            raise ValueError(f"the bridge's secret needs at least 16 bytes, got {len(secret)}")
        keys = HKDF(SHA256(), 64, salt=None, info=f"search-fetch {purpose}".encode()).derive(secret)
        self._nonce_key = keys[32:]
        self._cipher = AESGCM(keys[:32])
        self._audience = audience.encode("utf-8", "replace")

    def seal(self, value: dict[str, Any]) -> str:
        """URL-safe text. The same value gives the same token: the nonce is derived from it."""
        text = json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
        plain = zlib.compress(text, 6)
        bound = len(self._audience).to_bytes(4, "big") + self._audience + plain
        nonce = hashlib.blake2b(bound, key=self._nonce_key, digest_size=_NONCE_BYTES).digest()
        sealed = self._cipher.encrypt(nonce, plain, self._audience)
        return base64.urlsafe_b64encode(nonce + sealed).decode()

    def open(self, token: str) -> dict[str, Any] | None:
        """The sealed value, or None for anything that was not sealed here for this."""
        try:
            raw = base64.urlsafe_b64decode(token.encode("ascii"))
            plain = self._cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], self._audience)
        except (ValueError, InvalidTag, UnicodeEncodeError):
            return None
        text = zlib.decompressobj().decompress(plain, _MAX_PLAIN_BYTES)
        return json.loads(text)
