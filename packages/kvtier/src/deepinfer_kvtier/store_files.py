"""Identity of a directory: FORMAT.json and the store secret, made once and never rewritten."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from deepinfer_kvtier.errors import ConfigError, StoreFormatError
from deepinfer_kvtier.format import FORMAT_VERSION
from deepinfer_kvtier.identity import SECRET_BYTES

FORMAT_FILE = "FORMAT.json"
SECRET_FILE = "SECRET"


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Store uuid (16 bytes) and secret (32 bytes)."""

    uuid: bytes
    secret: bytes


def open_store(root: Path, *, secret: bytes | None, read_only: bool, now_s: float) -> StoreIdentity:
    """Read the identity of a directory, creating it where there is none yet.

    raises: ConfigError when a read-only open finds no store or the directory cannot be made,
            StoreFormatError for another format version or damaged files.
    """
    format_path = root / FORMAT_FILE
    if not format_path.exists():
        if read_only:
            raise ConfigError(f"no cache at {root}: {FORMAT_FILE} is missing; check the path")
        try:
            (root / "w").mkdir(parents=True, exist_ok=True, mode=0o700)
            created = {
                "format": FORMAT_VERSION,
                "store": secrets.token_bytes(16).hex(),
                "created_s": int(now_s),
            }
            _publish_once(format_path, json.dumps(created).encode())
        except OSError as cause:
            raise ConfigError(f"cannot create a cache at {root}: {cause.strerror}") from cause
    uuid = _read_format(format_path)
    return StoreIdentity(uuid, secret or _read_secret(root, read_only))


def _read_format(path: Path) -> bytes:
    try:
        content: Any = json.loads(path.read_bytes())
        version = int(content["format"])
        uuid = bytes.fromhex(cast("str", content["store"]))
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise StoreFormatError(
            f"{path} is damaged: {cause}; restore or remove the store"
        ) from cause
    if version != FORMAT_VERSION:
        raise StoreFormatError(
            f"{path} has format version {version}, this release reads {FORMAT_VERSION};"
            " use another directory or a matching release"
        )
    if len(uuid) != 16:
        raise StoreFormatError(f"{path} is damaged: the store id has {len(uuid)} bytes, not 16")
    return uuid


def _read_secret(root: Path, read_only: bool) -> bytes:
    path = root / SECRET_FILE
    if not path.exists() and not read_only:
        _publish_once(path, secrets.token_bytes(SECRET_BYTES))
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        # The secret is configured elsewhere; inspection works without it, digests will not match.
        return bytes(SECRET_BYTES)
    except OSError as cause:
        raise StoreFormatError(f"cannot read the store secret {path}: {cause.strerror}") from cause
    if len(secret) != SECRET_BYTES:
        raise StoreFormatError(f"{path} must have {SECRET_BYTES} bytes, got {len(secret)}")
    return secret


def _publish_once(path: Path, content: bytes) -> None:
    """Create a file whole or not at all; whoever comes second keeps the first one's content."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
    finally:
        temporary.unlink(missing_ok=True)
