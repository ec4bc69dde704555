"""What a directory's operator decided about keeping and deleting, stored with the directory.

`policy.json` holds these settings, so that every process on the directory, the command line
included, deletes by the same rules. A setting that `open` is given explicitly wins over the file
and is written to it; what nobody has set has the default of `KVTierConfig`.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, Final

from deepinfer_kvtier.config import KVTierConfig, parse_config
from deepinfer_kvtier.errors import ConfigError, StoreFormatError

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


def write_policy(root: Path, settings: dict[str, Any]) -> None:
    """Replace the stored settings, whole or not at all. raises: ConfigError."""
    path = root / POLICY_FILE
    temporary = root / f".{POLICY_FILE}.{secrets.token_hex(8)}"
    try:
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(settings, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as cause:
        raise ConfigError(f"cannot store the policy in {path}: {cause.strerror}") from cause


def with_stored_policy(config: KVTierConfig) -> KVTierConfig:
    """The configuration a process works with: explicit settings, then stored ones, then defaults.

    raises: StoreFormatError for a damaged file, ConfigError when the two do not go together.
    """
    if config.path is None:
        return config
    return parse_config(config, **{**read_policy(config.path), **_explicit(config)})


def remember_policy(config: KVTierConfig) -> None:
    """Store the settings that were given explicitly; the others keep their stored values.

    raises: ConfigError, StoreFormatError.
    """
    if config.path is None or config.read_only:
        return
    stored = read_policy(config.path)
    wanted = {**stored, **_explicit(config)}
    if wanted != stored:
        write_policy(config.path, wanted)


def _parse(raw: bytes) -> KVTierConfig:
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    stored: Any = json.loads(raw)
    unknown = set(stored) - set(POLICY_FIELDS)
    if unknown:
        raise ValueError(f"unknown settings {sorted(unknown)}")
    return parse_config(None, **stored)


def _explicit(config: KVTierConfig) -> dict[str, Any]:
    """Policy settings somebody chose, as JSON would hold them."""
    return config.model_dump(
        mode="json", include=config.model_fields_set.intersection(POLICY_FIELDS)
    )
