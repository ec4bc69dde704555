"""Which segments of an object store are alive: one manifest for each writer, replaced by creation.

`manifest/<writer>/<generation>.json` (a checksum line, then JSON) lists what that writer stored. A
change is the *creation* of the next generation, which the store grants to exactly one of several
that try; the others read the winner and try again. That needs no lock, no clock, and no more of
the store than "create if absent".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from deepinfer_kvtier.remote.tiers.objects import Absent, Exists, ObjectStore, Unavailable

FOLDER = "manifest"
# Readers that listed just before a change still find the generation they listed.
KEEP_GENERATIONS = 16
MAX_ATTEMPTS = 20
MAX_MANIFEST_BYTES = 8 << 20
_VERSION = 1


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One immutable segment object. bytes: of the object; seen_s: last use, seconds since 1970."""

    number: int
    cls: str
    bucket: int
    bytes: int
    records: int
    seen_s: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything one writer has stored that is still wanted.

    tombs: numbers of index objects that hold key tombstones.
    grave: numbers of segments that are given up and whose objects wait for deletion.
    """

    writer: str
    generation: int = 0
    segments: dict[int, SegmentInfo] = field(default_factory=dict[int, SegmentInfo])
    tombs: tuple[int, ...] = ()
    grave: tuple[int, ...] = ()

    def pack(self) -> bytes:
        rows = [
            [s.number, s.cls, s.bucket, s.bytes, s.records, s.seen_s]
            for s in self.segments.values()
        ]
        body = json.dumps(
            {"format": _VERSION, "segments": rows, "tombs": self.tombs, "grave": self.grave},
            separators=(",", ":"),
        ).encode()
        return f"{xxhash.xxh3_128_hexdigest(body)}\n".encode() + body + b"\n"

    @property
    def empty(self) -> bool:
        """Nothing is left that anybody could want."""
        return not (self.segments or self.tombs or self.grave)


def parse_manifest(writer: str, generation: int, raw: bytes) -> Manifest | None:
    """None when the bytes are no manifest this version can read."""
    if len(raw) > MAX_MANIFEST_BYTES:
        return None
    check, _, body = raw.partition(b"\n")
    body = body.removesuffix(b"\n")
    if check.decode("ascii", "replace") != xxhash.xxh3_128_hexdigest(body):
        return None
    try:
        content: Any = json.loads(body)
        if content["format"] != _VERSION:
            return None
        segments = [SegmentInfo(int(n), str(c), *map(int, rest)) for n, c, *rest in content["segments"]]  # fmt: skip # noqa: E501
        return Manifest(
            writer,
            generation,
            {segment.number: segment for segment in segments},
            tuple(int(n) for n in content["tombs"]),
            tuple(int(n) for n in content["grave"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def manifest_path(writer: str, generation: int) -> str:
    """Object name of one generation."""
    return f"{FOLDER}/{writer}/{generation:010d}.json"


def list_generations(objects: ObjectStore, writer: str | None = None) -> dict[str, list[int]]:
    """Generations by writer, ascending. raises: Unavailable."""
    prefix = f"{FOLDER}/{writer}/" if writer else f"{FOLDER}/"
    found: dict[str, list[int]] = {}
    for path, _ in objects.list(prefix):
        pieces = path.split("/")
        name = pieces[-1].removesuffix(".json")
        if len(pieces) == 3 and len(pieces[1]) == 32 and name.isdigit():
            found.setdefault(pieces[1], []).append(int(name))
    return {name: sorted(numbers) for name, numbers in found.items()}


def read_manifest(objects: ObjectStore, writer: str, generation: int) -> Manifest | None:
    """One generation; None when it is gone or damaged. raises: Unavailable."""
    try:
        raw = objects.get(manifest_path(writer, generation))
    except Absent:
        return None
    return parse_manifest(writer, generation, raw)


def latest(objects: ObjectStore, writer: str) -> tuple[Manifest, list[int]]:
    """The newest readable content of a writer, under the newest number, and all numbers there are.

    raises: Unavailable.
    """
    numbers = list_generations(objects, writer).get(writer, [])
    for generation in reversed(numbers):
        # Twice: falling back for one damaged answer would forget what the newest one lists.
        manifest = read_manifest(objects, writer, generation) or read_manifest(
            objects, writer, generation
        )
        if manifest is not None:
            # A damaged newer generation still occupies its number.
            return replace(manifest, generation=numbers[-1]), numbers
    return Manifest(writer, generation=numbers[-1] if numbers else 0), numbers


def change(
    objects: ObjectStore, writer: str, edit: Callable[[Manifest], Manifest | None]
) -> Manifest:
    """Apply an edit to a writer's newest manifest, against any number of others that do so too.

    edit: gives the wanted content, or None when there is nothing to change (any more).
    raises: Unavailable.
    """
    for _ in range(MAX_ATTEMPTS):
        current, numbers = latest(objects, writer)
        wanted = edit(current)
        if wanted is None:
            return current
        wanted = replace(wanted, generation=current.generation + 1)
        try:
            objects.create(manifest_path(writer, wanted.generation), [wanted.pack()])
        except Exists:
            # Somebody was faster, or our own request was repeated after its answer got lost.
            continue
        for old in numbers:
            if old <= wanted.generation - KEEP_GENERATIONS:
                objects.delete(manifest_path(writer, old))
        return wanted
    raise Unavailable("a manifest changes faster than it can be edited")
