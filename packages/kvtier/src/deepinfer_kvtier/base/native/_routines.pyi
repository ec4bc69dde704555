"""The extension module. Each routine has a pure form where it is used, tested to be equal."""

from collections.abc import Sequence
from typing import Any, Literal

SOURCE_CHECKSUM: str

def sum_records(lists: list[Sequence[memoryview]], /) -> list[bytes | None]:
    """xxh3_128 of records, each a sequence of views; None for those of at most 240 bytes."""

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
    """For tests: the form of the sum that is used from now on; False where it cannot run."""
