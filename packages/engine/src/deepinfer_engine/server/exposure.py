"""Starts that are not safe: refused or told before anything listens."""

from __future__ import annotations

import ipaddress
import logging
import stat
from collections.abc import Mapping
from pathlib import Path

from deepinfer_engine.errors import ConfigError
from deepinfer_engine.settings import Settings

log = logging.getLogger(__name__)

WEAK_BELOW = 20
"""Characters of a key. 20 random letters and digits cannot be guessed over a network."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_open(settings: Settings, keys: Mapping[str, str]) -> None:
    """Raises ConfigError for a server that strangers could use, unless the operator said so."""
    if not is_loopback(settings.host) and not keys and not settings.open_to_all:
        raise ConfigError(
            f"{settings.host} can be reached by others, and no key is asked for: name a file of "
            "keys with --api-key-file, listen on 127.0.0.1, or say --open-to-all"
        )


def check_exposure(settings: Settings, keys: Mapping[str, str], admin_key: str | None) -> None:
    """`refuse_open`, and log what is weak."""
    refuse_open(settings, keys)
    for text in warnings(settings, keys, admin_key):
        log.warning("%s", text)


def warnings(settings: Settings, keys: Mapping[str, str], admin_key: str | None) -> list[str]:
    """What the operator should know, a line each; no line holds a key."""
    found = [
        f"the API key {name!r} can be guessed: {why}; make one with `openssl rand -hex 24`"
        for name, secret in keys.items()
        if (why := _weakness(secret))
    ]
    if admin_key is not None and (why := _weakness(admin_key)):
        found.append(f"the admin key can be guessed: {why}; make one with `openssl rand -hex 24`")
    if admin_key is not None and admin_key in keys.values():
        found.append("the admin key is also an API key: whoever has that may use admin routes")
    files = (settings.api_key_file, settings.admin_key_file)
    found += [text for path in files if path is not None and (text := _readable_by_others(path))]
    if not is_loopback(settings.host) and not keys:
        found.append(f"{settings.host} is open to everybody who reaches it: no key is asked for")
    if "*" in settings.cors_origins and not keys:
        found.append(
            "cors_origins is * and no key is asked for: every web page may use this server"
        )
    if "*" in settings.allowed_hosts and not keys:
        found.append(
            "allowed_hosts is * and no key is asked for: a web page whose name is rebound to this "
            "server may use it"
        )
    return found


def _weakness(secret: str) -> str | None:
    if len(secret) < WEAK_BELOW:
        return f"it has {len(secret)} characters, fewer than {WEAK_BELOW}"
    if len(set(secret)) < 8:
        return f"it is made of {len(set(secret))} different characters"
    return None


def _readable_by_others(path: Path) -> str | None:
    try:
        mode = path.stat().st_mode
    except OSError:
        return None  # whoever reads it says so
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"others can read or write the key file {path}: chmod 600 {path}"
    return None
