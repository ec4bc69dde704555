"""Refuses a PDF whose compressed streams would inflate beyond the limits, before it is parsed."""

from __future__ import annotations

import zlib
from typing import Any

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import LimitError

_STEP = 256 * 1024


def check_streams(body: bytes, limits: Limits) -> None:
    """Inflate every Flate stream that is no picture, keeping nothing.

    Pictures are never decoded when only text is read. Raises LimitError(decompression_bomb) when
    one stream passes `limits.decoded_bytes` or all together `limits.document_total_bytes`.
    """
    total = 0
    position = 0
    while (found := body.find(b"stream", position)) >= 0:
        position = found + 6
        if body[max(found - 3, 0) : found] == b"end":
            continue
        start = position + 2 if body[position : position + 2] == b"\r\n" else position + 1
        head = body[max(found - 2000, 0) : found]
        head = head[head.rfind(b"obj") + 3 :]
        filters = head.count(b"/FlateDecode") + head.count(b"/Fl ")
        if not filters or b"/Image" in head:
            continue
        size, read = _inflated(memoryview(body)[start:], filters, limits.decoded_bytes)
        total += size
        position = start + read
        if size >= limits.decoded_bytes or total >= limits.document_total_bytes:
            raise LimitError(
                "decompression_bomb",
                f"the document's streams expand beyond {limits.decoded_bytes} bytes each"
                f" or {limits.document_total_bytes} in all",
                details={"wire_bytes": len(body)},
            )


def _inflated(data: memoryview, stages: int, room: int) -> tuple[int, int]:
    """(bytes that come out of the last stage, at most about `room`; bytes read from `data`)."""
    inflaters = [zlib.decompressobj() for _ in range(min(stages, 4))]
    size = read = 0
    try:
        while read < len(data) and size < room and not inflaters[0].eof:
            pieces = [bytes(data[read : read + 4096])]
            read += len(pieces[0])
            for inflater in inflaters:
                pieces = _stage(inflater, pieces, room)
                size += sum(map(len, pieces)) if inflater is not inflaters[-1] else 0
            size += sum(map(len, pieces))
    except zlib.error:
        pass  # encrypted or damaged: the parser will say so, within the worker's limits
    # What follows the compressed data may be the next stream already.
    return size, read - len(inflaters[0].unused_data)


def _stage(inflater: Any, pieces: list[bytes], room: int) -> list[bytes]:
    out: list[bytes] = []
    size = 0
    for piece in pieces:
        rest = piece
        while rest and size < room and not inflater.eof:
            out.append(inflater.decompress(rest, _STEP))
            size += len(out[-1])
            rest = inflater.unconsumed_tail
    return out
