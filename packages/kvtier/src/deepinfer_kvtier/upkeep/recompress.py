"""Stored records with another codec: expanded where they are compressed, then compressed anew."""

from __future__ import annotations

from dataclasses import replace

from deepinfer_kvtier.checksums import checksum_of
from deepinfer_kvtier.coding.codec import CODECS, require_library
from deepinfer_kvtier.coding.compression import open_compressor, read_table
from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.puts.encode import expanded
from deepinfer_kvtier.store.encoded import EncodedRecord


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
