"""API keys: who may call, and under which name their cache and limits are kept."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer_engine.codec.errors import AuthenticationFailed, PermissionDenied
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.settings import Settings


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `key_id` None: the server is open and nobody was asked."""

    key_id: str | None = None

    @property
    def owner(self) -> str:
        """Under which name what the caller leaves on the server is kept."""
        return self.key_id or "anonymous"

    def salt(self, user_id: str | None) -> str:
        """Name of the cache partition: the end user, else the key, else `anonymous`.

        An end user is a name inside its key: two customers with a user `1` share nothing, and no
        customer can probe another's cache by sending that customer's user id.
        """
        if self.key_id is None:
            return user_id or "anonymous"
        return f"{self.key_id}/{user_id}" if user_id else self.key_id


class KeyRing:
    """The accepted keys by digest; compares in constant time and keeps no key in clear."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """`keys` maps id to secret; an empty ring accepts everybody."""
        self._digests = tuple((name, _digest(secret)) for name, secret in keys.items())

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """The caller of a request; raises AuthenticationFailed."""
        if not self._digests:
            return Caller()
        secret = presented_key(headers)
        if secret is None:
            raise AuthenticationFailed(
                "this server wants an API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        digest = _digest(secret)
        # Every entry is compared, so the time taken does not tell which one was near.
        found = [name for name, known in self._digests if hmac.compare_digest(known, digest)]
        if not found:
            raise AuthenticationFailed("the API key is not one of this server's")
        return Caller(found[0])


class AdminGate:
    """Admin routes answer to the admin key alone, also on the loopback interface: whatever else
    runs on this machine, a browser for one, reaches that too."""

    def __init__(self, secret: str | None) -> None:
        self._digest = None if secret is None else _digest(secret)

    def admits(self, headers: Mapping[str, str]) -> bool:
        secret = presented_key(headers)
        return (
            self._digest is not None
            and secret is not None
            and hmac.compare_digest(self._digest, _digest(secret))
        )

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises PermissionDenied unless the caller may use admin routes."""
        if self._digest is None:
            raise PermissionDenied(
                "admin routes want a key, and this server has none: start it with --admin-key-file"
            )
        if not self.admits(headers):
            raise PermissionDenied("admin routes want the admin key in `Authorization: Bearer KEY`")


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The key of `Authorization: Bearer` or `x-api-key`, None when neither is there."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key") or None


def accepted_keys(settings: Settings) -> dict[str, str]:
    """The keys of the file and the one of `api_key`, by id. Raises ConfigError."""
    keys = read_keys(settings.api_key_file)
    if settings.api_key is not None:
        secret = settings.api_key.get_secret_value().strip()
        if not secret:
            raise ConfigError("api_key is empty; leave it out for an open server")
        keys.setdefault(f"key-{_digest(secret)[:4].hex()}", secret)
    return keys


def read_keys(path: Path | None) -> dict[str, str]:
    """`id:key` or `key` a line, `#` starts a comment. A key without id is named by its digest."""
    if path is None:
        return {}
    keys: dict[str, str] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, colon, secret = text.partition(":")
        name, secret = (
            (name.strip(), secret.strip()) if colon else (f"key-{_digest(text)[:4].hex()}", text)
        )
        if not name or not secret or "/" in name:
            raise ConfigError(f"{path}, line {number}: wanted `key` or `id:key` (no / in the id)")
        if name in keys:
            raise ConfigError(f"{path}, line {number}: the id {name!r} is there twice")
        keys[name] = secret
    if not keys:
        raise ConfigError(f"{path} holds no API key; leave api_key_file unset for an open server")
    return keys


def read_secret(path: Path | None) -> str | None:
    """First line of a file that holds one secret."""
    if path is None:
        return None
    secret = _read(path).partition("\n")[0].strip()
    if not secret:
        raise ConfigError(f"{path} is empty; its first line must be the key")
    return secret


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the key file {path}: {exc}") from exc


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
