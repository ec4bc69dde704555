"""Files at the root of a store: FORMAT.json, the secret, and policy.json."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from blake3 import blake3

from deepinfer_kvtier.base.config import KVTierConfig, Mode, parse_config, permissions_of
from deepinfer_kvtier.base.errors import ConfigError, StoreFormatError
from deepinfer_kvtier.base.files import PRIVATE, FileStamp, Permissions, stamp_of
from deepinfer_kvtier.base.identity import SECRET_BYTES
from deepinfer_kvtier.base.timing import SteadyClock
from deepinfer_kvtier.log.format import FORMAT_VERSION

CLAIM_WAIT_S = 10.0
FORMAT_FILE = "FORMAT.json"
SECRET_FILE = "SECRET"
CHECK_FILE = "CHECK"
CLOCK_FILE: Final = "clock.json"
JUMP_S: Final = 60.0
"""Differences below this are drift and corrections of it, not jumps."""
UNSEEN_S: Final = 24 * 3600.0
"""Time that may have passed, at most, while nothing of this store was running and nobody knows."""


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Store uuid (16 bytes), secret (32 bytes), and how its processes share it.

    fits: secret and uuid are those that the records were stored under, by a stored check value.
    """

    uuid: bytes
    secret: bytes
    mode: Mode
    fits: bool


def open_store(
    root: Path,
    *,
    secret: bytes | None,
    read_only: bool,
    now_s: float,
    mode: Mode | None = None,
    permissions: Permissions = PRIVATE,
) -> StoreIdentity:
    """Read the identity of a directory, creating it where there is none yet.

    A newer format may be looked at read-only: what this release cannot parse is not there for it.

    mode:   what the caller wants; None = what the store has, "embedded" for a new one.
    raises: ConfigError when a read-only open finds no store, when the directory cannot be made, or
            when it was made for another mode; StoreFormatError for another format version or
            damaged files.
    """
    format_path = root / FORMAT_FILE
    if not format_path.exists():
        if read_only:
            raise ConfigError(f"no cache at {root}: {FORMAT_FILE} is missing; check the path")
        try:
            fresh = not root.exists()
            (root / "w").mkdir(parents=True, exist_ok=True, mode=0o700)
            permissions.give(root / "w", folder=True)
            if fresh:
                permissions.give(root, folder=True)
            created = {
                "format": FORMAT_VERSION,
                "store": secrets.token_bytes(16).hex(),
                "created_s": int(now_s),
                "mode": mode or "embedded",
            }
            _publish_once(format_path, json.dumps(created).encode(), mode, permissions)
        except OSError as cause:
            raise ConfigError(f"cannot create a cache at {root}: {cause.strerror}") from cause
    uuid, made_for = _read_format(format_path, newer=read_only)
    if mode not in (None, made_for):
        # The two tell living writers from dead ones in different ways.
        raise ConfigError(
            f"the cache at {root} was made for mode {made_for!r}, it cannot be opened as {mode!r}:"
            " use that mode, or another directory"
        )
    secret = secret or _read_secret(root, read_only, made_for, permissions)
    fits = _fits(root, uuid, secret, read_only, made_for, permissions)
    return StoreIdentity(uuid, secret, made_for, fits)


def _fits(
    root: Path, uuid: bytes, secret: bytes, read_only: bool, mode: Mode, permissions: Permissions
) -> bool:
    """Compare with the check value, which the first one to open the store leaves there."""
    path = root / CHECK_FILE
    expected = blake3(b"kvtier check" + uuid, key=secret).digest()
    try:
        if not read_only and not any((root / "w").glob("?" * 32)):
            # Nothing is stored yet: whoever writes first says under which secret.
            path.unlink(missing_ok=True)
            path.with_name(f".{path.name}.claim").unlink(missing_ok=True)
        if not path.exists() and not read_only:
            _publish_once(path, expected, mode, permissions)
        return path.read_bytes() == expected
    except FileNotFoundError:
        return True  # looked at before anybody wrote
    except OSError as cause:
        raise ConfigError(f"cannot use {path}: {cause.strerror}") from cause


def complaints_about_access(root: Path, permissions: Permissions) -> list[str]:
    """Why others may read what is stored here, or write it, in words. raises: ConfigError for a
    folder in which anybody may put files."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        folder = os.stat(root)
        if folder.st_mode & 0o002 and not permissions.mode & 0o002:
            raise ConfigError(
                f"anybody may write to {root}, and so make any prompt hit: take the right away"
                f" (chmod o-w {root}), or say file_mode=0o666"
            )
        if folder.st_uid not in (os.geteuid(), 0) and permissions.gid is None:
            found.append(f"{root} belongs to another user ({folder.st_uid}), who decides over it")
        secret = os.stat(root / SECRET_FILE)
        excess = secret.st_mode & 0o077 & ~permissions.mode
        if excess:
            found.append(
                f"others may read the secret of the store (chmod {permissions.mode:o}"
                f" {root / SECRET_FILE})"
            )
    return found


def settle_clock(root: Path, clock: SteadyClock, newest_s: float, *, shared: bool) -> float:
    """Set a clock by what the store has seen; returns by how much the machine's had jumped.

    Within one boot of one machine it is known how much time has passed since the store was last in
    use. Else at most `UNSEEN_S` are believed to have: records get older by less than the truth
    after a long pause, and are not all deleted after a battery has failed.

    newest_s: newest time in the store's records, 0 without any; on a mount there is no other.
    """
    if not newest_s:
        return 0.0  # nothing is there that could grow old
    now_s = clock.wall()
    seen = None if shared else _read_clock(root)
    if seen is not None and seen[0] == _boot_id() and clock.monotonic() >= seen[1]:
        expected_s = seen[2] + clock.monotonic() - seen[1]
        jump_s = now_s - expected_s
        if abs(jump_s) <= JUMP_S:
            return 0.0
        clock.rebase(expected_s)
        return jump_s
    last_s = newest_s if seen is None else max(newest_s, seen[2])
    believed_s = min(max(now_s, last_s - JUMP_S), last_s + UNSEEN_S)
    if believed_s != now_s:
        clock.rebase(believed_s)
    return now_s - believed_s


def save_clock(root: Path, clock: SteadyClock, permissions: Permissions) -> None:
    """Leave the time for who opens the store next. raises: OSError."""
    content = {"boot": _boot_id(), "monotonic_s": clock.monotonic(), "wall_s": clock.wall()}
    temporary = root / f".{CLOCK_FILE}.{secrets.token_hex(8)}"
    try:
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            permissions.give(fd)
            json.dump(content, file)
        temporary.replace(root / CLOCK_FILE)
    finally:
        temporary.unlink(missing_ok=True)


def _read_clock(root: Path) -> tuple[str, float, float] | None:
    """(boot, monotonic seconds, wall seconds); None where there is nothing to go by."""
    try:
        content: Any = json.loads((root / CLOCK_FILE).read_bytes())
        return str(content["boot"]), float(content["monotonic_s"]), float(content["wall_s"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def check_format(root: Path) -> None:
    """raises: ConfigError without a store, StoreFormatError unless it has this very format."""
    if not (root / FORMAT_FILE).exists():
        raise ConfigError(f"no cache at {root}: {FORMAT_FILE} is missing; check the path")
    _read_format(root / FORMAT_FILE, newer=False)


def _read_format(path: Path, *, newer: bool) -> tuple[bytes, Mode]:
    try:
        content: Any = json.loads(path.read_bytes())
        version = int(content["format"])
        uuid = bytes.fromhex(cast("str", content["store"]))
        mode = content.get("mode", "embedded")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as cause:
        raise StoreFormatError(
            f"{path} is damaged: {cause}; restore or remove the store"
        ) from cause
    if version > FORMAT_VERSION and not newer:
        raise StoreFormatError(
            f"{path} has format version {version}, this release writes {FORMAT_VERSION};"
            " open it read-only, or use another directory or a matching release"
        )
    if version < FORMAT_VERSION:
        raise StoreFormatError(
            f"{path} has format version {version}, older than any that this release can read"
            f" ({FORMAT_VERSION}); migrate it with a release that reads both"
        )
    if len(uuid) != 16:
        raise StoreFormatError(f"{path} is damaged: the store id has {len(uuid)} bytes, not 16")
    if mode not in ("embedded", "shared-fs"):
        raise StoreFormatError(f"{path} has mode {mode!r}, this release knows no such mode")
    return uuid, mode


def _read_secret(root: Path, read_only: bool, mode: Mode, permissions: Permissions) -> bytes:
    path = root / SECRET_FILE
    if not path.exists() and not read_only:
        _check_unused(root)
        _publish_once(path, secrets.token_bytes(SECRET_BYTES), mode, permissions)
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


def _check_unused(root: Path) -> None:
    """A new secret would hide, silently and for ever, what was stored under another.

    Writers come after the secret: one that is there means that it was kept elsewhere, or was lost.
    raises: ConfigError.
    """
    path = root / SECRET_FILE
    begun = path.with_name(f".{path.name}.claim").exists()
    if not begun and any((root / "w").iterdir()) and not path.exists():
        raise ConfigError(
            f"the cache at {root} has records and no file {SECRET_FILE}: pass `secret`, the one"
            " that they were stored with, or restore the file"
        )


def _publish_once(path: Path, content: bytes, mode: Mode | None, permissions: Permissions) -> None:
    """Create a file whole or not at all; whoever comes second keeps the first one's content."""
    if mode == "shared-fs" and not _claim(path):
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            permissions.give(fd)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode == "shared-fs":
            temporary.rename(path)  # nobody else does: the claim is ours, and is never given back
            return
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
    finally:
        temporary.unlink(missing_ok=True)


def _claim(path: Path) -> bool:
    """Whether this process is the one that creates a file; if not, wait until the other has.

    Exclusive creation is what every shared file system keeps, unlike locks and hard links.
    raises: OSError, StoreFormatError when whoever claimed it has died before it was there.
    """
    claim = path.with_name(f".{path.name}.claim")
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        deadline = time.monotonic() + CLAIM_WAIT_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise StoreFormatError(
                    f"the creation of {path} was begun and not finished: remove {claim} and try"
                    " again"
                ) from None
            time.sleep(0.05)
        return False
    return True


POLICY_FILE: Final = "policy.json"
POLICY_FIELDS: Final = (
    "admission",
    "class_quotas",
    "classes",
    "floor_s",
    "high_water",
    "low_water",
    "min_free_share",
    "namespace_quotas",
    "quota_bytes",
)
_MAX_BYTES = 1 << 20


def read_policy(root: Path) -> dict[str, Any]:
    """The stored settings, plain values by field; empty when none were stored.

    raises: StoreFormatError when the file is damaged or names a setting this release lacks: it
            might forbid a deletion that would then happen.
    """
    path = root / POLICY_FILE
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as cause:
        raise StoreFormatError(f"cannot read {path}: {cause.strerror}") from cause
    try:
        checked = _parse(raw)
    except (ValueError, TypeError, RecursionError) as cause:
        raise StoreFormatError(
            f"{path} cannot be used: {cause}; correct it, or remove it to return to the defaults"
        ) from cause
    return _explicit(checked)


def write_policy(
    root: Path, settings: dict[str, Any], permissions: Permissions = PRIVATE
) -> FileStamp:
    """Replace the stored settings, whole or not at all; returns its stamp. raises: ConfigError."""
    path = root / POLICY_FILE
    temporary = root / f".{POLICY_FILE}.{secrets.token_hex(8)}"
    try:
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                permissions.give(fd)
                json.dump(settings, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
                stamp = stamp_of(fd)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as cause:
        raise ConfigError(f"cannot store the policy in {path}: {cause.strerror}") from cause
    return stamp


def with_stored_policy(config: KVTierConfig) -> KVTierConfig:
    """The configuration a process works with: explicit settings, then stored ones, then defaults.

    raises: StoreFormatError for a damaged file, ConfigError when the two do not go together.
    """
    if config.path is None:
        return config
    return parse_config(config, **{**read_policy(config.path), **_explicit(config)})


def remember_policy(config: KVTierConfig) -> FileStamp:
    """Store the settings that were given explicitly; the others keep their stored values.

    returns: the stamp of what was written; None where nothing had to be.
    raises: ConfigError, StoreFormatError.
    """
    if config.path is None or config.read_only:
        return None
    stored = read_policy(config.path)
    wanted = {**stored, **_explicit(config)}
    return write_policy(config.path, wanted, permissions_of(config)) if wanted != stored else None


def _parse(raw: bytes) -> KVTierConfig:
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    stored: Any = json.loads(raw)
    unknown = set(stored) - set(POLICY_FIELDS)
    if unknown:
        raise ValueError(f"unknown settings {sorted(unknown)}")
    return parse_config(None, **stored)


def _explicit(config: KVTierConfig) -> dict[str, Any]:
    """Policy settings that were chosen, as JSON would hold them."""
    return config.model_dump(
        mode="json", include=config.model_fields_set.intersection(POLICY_FIELDS)
    )
