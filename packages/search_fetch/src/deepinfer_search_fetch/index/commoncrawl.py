"""Import of Common Crawl's published host or domain ranks.

The file is tab-separated, gzip or plain, with the columns harmonicc_pos, harmonicc_val, pr_pos,
pr_val, host_rev (and more that are not read); names are reversed (org.wikipedia.en), positions
start at 1.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.index.authority import LinkEvidence, node_of, write_evidence

DEFAULT_TOP = 1_000_000


def import_ranks(
    file: Path, output: Path, *, top: int = DEFAULT_TOP, hosts: int | None = None
) -> int:
    """Store evidence for the first `top` rows; returns the number of nodes stored.

    hosts: how many the whole release ranks; None counts the rows of the file.
    Raises InvalidRequestError for a file of another form, naming the line.
    """
    best: dict[str, tuple[int, int]] = {}
    rows = 0
    for line_number, harmonic, rank, host in _rows(file):
        rows += 1
        if rows > top:
            if hosts is not None:
                break
            continue
        if harmonic < 1 or rank < 1:
            raise _wrong(file, line_number, "positions start at 1")
        node = node_of(host)
        known = best.get(node, (harmonic, rank))
        best[node] = (min(known[0], harmonic), min(known[1], rank))
    total = max(hosts or rows, 1)
    evidence = {
        node: LinkEvidence(harmonic - 1, rank - 1, total, None)
        for node, (harmonic, rank) in best.items()
    }
    write_evidence(output, "common_crawl", evidence)
    return len(evidence)


def _rows(file: Path) -> Iterator[tuple[int, int, int, str]]:
    """(line, harmonic position, PageRank position, host)."""
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        lines = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if packed else raw
        try:
            for number, line in enumerate(lines, start=1):
                if line.startswith(b"#") or not line.strip():
                    continue
                columns = line.decode("utf-8", "replace").rstrip("\n").split("\t")
                try:
                    name = ".".join(reversed(columns[4].split(".")))
                    yield number, int(columns[0]), int(columns[2]), name
                except (IndexError, ValueError):
                    raise _wrong(
                        file,
                        number,
                        "wanted harmonicc_pos, harmonicc_val, pr_pos, pr_val, host_rev",
                    ) from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InvalidRequestError("invalid_argument", f"{file}: {error}") from None


def _wrong(file: Path, line: int, problem: str) -> InvalidRequestError:
    return InvalidRequestError("invalid_argument", f"{file} line {line}: {problem}")
