"""Writing a directory again, offline: into the current format, without waste, on another disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_kvtier.cache import Cache
from deepinfer_kvtier.clock import SystemClock
from deepinfer_kvtier.config import KVTierConfig, parse_config
from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.io import PosixIo
from deepinfer_kvtier.policy import POLICY_FILE
from deepinfer_kvtier.store.encoded import EncodedRecord
from deepinfer_kvtier.store.store_files import SECRET_FILE, check_format
from deepinfer_kvtier.upkeep.moving import copy_records
from deepinfer_kvtier.upkeep.recompress import Recompression
from deepinfer_kvtier.upkeep.survey import rows_by_segment


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """Records and payload bytes that were written.

    left_behind: could not be read.
    not_recompressed: were copied as they lay there although another codec was asked for: they are
                 encrypted, or compressed with a codec that is not known here.
    """

    records: int
    payload_bytes: int
    left_behind: int
    not_recompressed: int


def migrate(source: Path, target: Path, *, compression: str | None = None) -> MigrationReport:
    """Write every readable record of `source` into a new directory `target`.

    compression: codec for all parts (the names of parts are not on disk), "none" to expand what is
                 compressed; None = every record as it is.
    Secret and policy go along, so that the same prompts hit; ages and classes are kept. The source
    is only read. What writers add to it meanwhile may or may not be in the copy: stop them first.
    raises: ConfigError, StoreFormatError for a source this release cannot read, OSError.
    """
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty: name a new directory")
    if source.resolve() in target.resolve().parents:
        raise ConfigError(f"{target} lies inside {source}: name a directory outside of it")
    recompress = None if compression is None else Recompression(compression)
    check_format(source)
    settings = parse_config(source, read_only=True, host_bytes=0)
    with Cache(settings, SystemClock(), PosixIo()) as old:
        try:
            target.mkdir(parents=True, exist_ok=True, mode=0o700)
            secret = _copy_identity(source, target)
        except OSError as cause:
            raise ConfigError(f"cannot create {target}: {cause.strerror}") from cause
        with Cache(_settings(old, target, secret), SystemClock(), PosixIo()) as new:
            return _copy(old, new, recompress)


def _copy_identity(source: Path, target: Path) -> bytes | None:
    """Take secret and policy along; a secret to open with when the source keeps none."""
    for name in (SECRET_FILE, POLICY_FILE):
        if (source / name).exists():
            shutil.copy2(source / name, target / name)
    return None if (source / SECRET_FILE).exists() else bytes(32)


def _settings(old: Cache, target: Path, secret: bytes | None) -> KVTierConfig:
    """The stored policy and the same mode, but nothing is deleted while copying."""
    assert old.directory is not None
    extra: dict[str, Any] = {} if secret is None else {"secret": secret}
    if old.directory.sharing.shared:
        extra["mode"] = "shared-fs"
    return parse_config(target, host_bytes=0, auto_gc=False, **extra)


def _copy(old: Cache, new: Cache, recompress: Recompression | None) -> MigrationReport:
    assert old.directory is not None
    assert new.directory is not None
    rows = old.directory.index.rows()
    records = total = 0
    for local, members in sorted(rows_by_segment(rows).items()):
        cls = old.directory.segments.get(local).cls
        change = _as_it_is if recompress is None else recompress
        for record in copy_records(old.directory, new.directory, members, cls, change):
            records += 1
            total += record.nbytes
    new.directory.seal()
    new.directory.sync()
    refused = 0 if recompress is None else recompress.refused
    return MigrationReport(records, total, len(rows) - records, refused)


def _as_it_is(record: EncodedRecord) -> EncodedRecord:
    return record
