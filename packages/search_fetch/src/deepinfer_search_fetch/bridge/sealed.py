"""Opaque tokens a client carries for us: AES-GCM under the server's key."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES = 12
_MAX_PLAIN_BYTES = 4 * 1024 * 1024


class Seal:
    """Seals small JSON values so that a client can neither read nor change them."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise ValueError(f"the bridge's secret needs at least 16 bytes, got {len(secret)}")
        self._key = hashlib.sha256(b"search-fetch bridge\0" + secret).digest()
        self._cipher = AESGCM(self._key)

    def seal(self, value: dict[str, Any]) -> str:
        """URL-safe text. The same value gives the same token: the nonce is derived from it."""
        text = json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
        plain = zlib.compress(text, 6)
        nonce = hashlib.blake2b(plain, key=self._key, digest_size=_NONCE_BYTES).digest()
        return base64.urlsafe_b64encode(nonce + self._cipher.encrypt(nonce, plain, None)).decode()

    def open(self, token: str) -> dict[str, Any] | None:
        """The sealed value, or None for anything this server did not seal."""
        try:
            raw = base64.urlsafe_b64decode(token.encode("ascii"))
            plain = self._cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], None)
        except (ValueError, InvalidTag, UnicodeEncodeError):
            return None
        text = zlib.decompressobj().decompress(plain, _MAX_PLAIN_BYTES)
        return json.loads(text)
