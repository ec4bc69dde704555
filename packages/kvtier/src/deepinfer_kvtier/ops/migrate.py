"""Stored records with another codec: expanded where they are compressed, then compressed anew."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepinfer_kvtier.api.cache import Cache
from deepinfer_kvtier.base.buffers import checksum_of
from deepinfer_kvtier.base.config import KVTierConfig, parse_config
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.base.timing import SystemClock
from deepinfer_kvtier.flow.compression import CODECS, open_compressor, read_table, require_library
from deepinfer_kvtier.flow.encode import expanded
from deepinfer_kvtier.log.compaction import copy_records, rows_by_segment
from deepinfer_kvtier.log.format import EncodedRecord
from deepinfer_kvtier.log.store_files import POLICY_FILE, SECRET_FILE, check_format


class Recompression:
    """Gives every record one codec, part by part where the parts of a record are known.

    refused: records that were left as they are.
    raises:  ConfigError for an unknown codec, and without the library.
    """

    def __init__(self, codec: str) -> None:
        if codec not in CODECS:
            raise ConfigError(f"compression is one of {', '.join(CODECS)}; got {codec!r}")
        require_library()
        self._codec = CODECS[codec]
        self._compressor = open_compressor(codec)
        self.refused = 0

    def __call__(self, record: EncodedRecord) -> EncodedRecord:
        """The record as it is to be written; an encrypted one can only be copied."""
        try:
            plain = expanded(record)
        except OSError:
            self.refused += 1
            return record
        if record.sealed:
            self.refused += 1
        if record.sealed or self._compressor is None:
            return plain
        payload = memoryview(b"".join(plain.views))
        stored = self._compressor.compress(payload, [(n, self._codec) for n in _sizes(record)])
        if stored is None:
            return plain
        return replace(
            plain,
            views=[memoryview(stored)],
            nbytes=len(stored),
            expanded_bytes=payload.nbytes,
            checksum=checksum_of([memoryview(stored)]),
            extra=b"",
        )


def _sizes(record: EncodedRecord) -> list[int]:
    """Bytes of the parts: those of a compressed record are in its table, others are one part."""
    table = read_table(memoryview(b"".join(record.views))) if record.expanded_bytes else None
    return [record.nbytes] if table is None else [size for size, _, _ in table]


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
    assert old.disk is not None
    extra: dict[str, Any] = {} if secret is None else {"secret": secret}
    if old.disk.liveness.shared:
        extra["mode"] = "shared-fs"
    return parse_config(target, host_bytes=0, auto_gc=False, **extra)


def _copy(old: Cache, new: Cache, recompress: Recompression | None) -> MigrationReport:
    assert old.disk is not None
    assert new.disk is not None
    rows = old.disk.index.rows()
    records = total = 0
    for local, members in sorted(rows_by_segment(rows).items()):
        cls = old.disk.segments.get(local).cls
        change = _as_it_is if recompress is None else recompress
        for record in copy_records(old.disk, new.disk, members, cls, change, leave_unreadable=True):
            records += 1
            total += record.nbytes
    new.disk.seal()
    new.disk.sync()
    refused = 0 if recompress is None else recompress.refused
    return MigrationReport(records, total, len(rows) - records, refused)


def _as_it_is(record: EncodedRecord) -> EncodedRecord:
    return record
