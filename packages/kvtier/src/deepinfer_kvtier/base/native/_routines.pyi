"""The extension module. Each routine has a pure form where it is used, tested to be equal."""

from collections.abc import Sequence
from typing import Any, Literal

SOURCE_CHECKSUM: str

def chain_digests(key: bytes, before: bytes, blocks: Any, size: int, /) -> list[bytes]:
    """Keyed BLAKE3 of the digest before and of each `size` bytes of `blocks`, at most 992.

    key, before: 32 bytes each; what follows on `before` is the first digest.
    """

def copy_rows(source: Any, target: Any, slots: Any, scatter: bool, /) -> None:
    """target[i] = source[slots[i]]; with `scatter` target[slots[i]] = source[i].

    source, target: uint8 [rows, length], rows at equal distances. slots: int64 [rows].
    """

def find_rows(
    slots: Any, rows: Any, lows: Any, highs: Any, kinds: Any, shards: Any, found: Any, /
) -> None:
    """Row numbers of keys in an `EntryTable`, -1 where there is none, into `found` (int64).

    slots: uint32, a power of two of them. rows: `log.index.ROW`. lows, highs: uint64 halves of the
    keys; kinds, shards: uint8; one of each a key.
    """

def sum_records(lists: list[Sequence[memoryview]], held: int, /) -> list[bytes | None]:
    """xxh3_128 of records, each a sequence of views; None for those of at most 240 bytes.

    held: up to so many bytes in all, other threads of the interpreter wait for the call.
    """

def read_records(
    fd: int,
    offset: int,
    wanted: list[Any],
    tails: bytearray | memoryview,
    size: int,
    slot: int,
    kind: int,
    shard: int,
    sealed_flag: int,
    got: int,
    /,
) -> str:
    """Read slots that lie next to each other into `Wanted.views` and `tails`, and judge each.

    size: bytes of each payload, more than 240; slot: of each slot; sealed_flag: the flag in a
          trailer that says that its `extra` opens the record.
    got: with fd -1 nothing is read; so many bytes of the slots are in memory already.
    returns: a character a record: o = good, c = damaged, m = another record, s = not there; the
             attributes of `Wanted` say what its trailer says, unless it is not there.
    raises: OSError.
    """

def write_records(fd: int, offset: int, lists: list[Sequence[Any]], trailers: Any, /) -> None:
    """Write payloads, trailers (192 bytes each, one behind the other) and zeros to the page's end.

    raises: OSError.
    """

def use_mixer(name: Literal["plain", "avx2", "avx512"] | str, /) -> bool:
    """For tests: the form of sums and digests used from now on; False where it cannot run."""
