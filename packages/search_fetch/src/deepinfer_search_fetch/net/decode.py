"""Content-Encoding, decoded piecewise under a running size and ratio cap."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import cast

import brotli
import zstandard

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import LimitError, UpstreamError

ACCEPT_ENCODING = "gzip, deflate, br, zstd"
_KNOWN = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd"})
MAX_STACKED = 2
_STEP = 256 * 1024
_ZSTD_WINDOW = 8 * 1024 * 1024


def decode_body(wire: bytes, content_encoding: str, limits: Limits) -> bytes:
    """Undo `content_encoding` (a header value such as "gzip" or "gzip, br").

    Raises LimitError(decompression_bomb) as soon as a cap is passed, long before the whole
    output exists; UpstreamError for broken data.
    """
    encodings = [e.strip().lower() for e in content_encoding.split(",")]
    # What names no coding ("utf-8", "none") is ignored, as browsers do.
    encodings = [e for e in encodings if e in _KNOWN]
    if len(encodings) > MAX_STACKED:
        raise LimitError(
            "decompression_bomb",
            f"{len(encodings)} stacked encodings, at most {MAX_STACKED} are decoded",
        )
    data = wire
    for encoding in reversed(encodings):
        data = _collect(_pieces(data, encoding), len(wire), limits)
    if len(data) > limits.decoded_bytes:
        raise LimitError(
            "response_too_large",
            f"body exceeds {limits.decoded_bytes} bytes",
            details={"limit": "decoded_bytes", "value": limits.decoded_bytes},
        )
    return data


def _collect(pieces: Iterator[bytes], wire_bytes: int, limits: Limits) -> bytes:
    out: list[bytes] = []
    size = 0
    try:
        for piece in pieces:
            size += len(piece)
            ratio_cap = max(limits.ratio_grace_bytes, wire_bytes * limits.decompression_ratio)
            if size > limits.decoded_bytes or size > ratio_cap:
                raise LimitError(
                    "decompression_bomb",
                    f"body expands beyond {min(limits.decoded_bytes, ratio_cap)} bytes",
                    details={
                        "limit": "decoded_bytes"
                        if size > limits.decoded_bytes
                        else "decompression_ratio",
                        "value": min(limits.decoded_bytes, ratio_cap),
                        "wire_bytes": wire_bytes,
                    },
                )
            out.append(piece)
    except (zlib.error, brotli.error, zstandard.ZstdError) as error:
        raise UpstreamError(
            "upstream_http", f"compressed body is damaged: {error}", retryable=False
        ) from None
    return b"".join(out)


def _pieces(data: bytes, encoding: str) -> Iterator[bytes]:
    if encoding in ("gzip", "x-gzip"):
        return _zlib_pieces(data, 16 + zlib.MAX_WBITS)
    if encoding == "deflate":
        # "deflate" means zlib by the standard and raw deflate in practice.
        has_header = len(data) >= 2 and data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
        return _zlib_pieces(data, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
    if encoding == "br":
        return _brotli_pieces(data)
    return _zstd_pieces(data)


def _zlib_pieces(data: bytes, window_bits: int) -> Iterator[bytes]:
    while data:
        inflater = zlib.decompressobj(window_bits)
        rest = data
        while rest and not inflater.eof:
            yield inflater.decompress(rest, _STEP)
            rest = inflater.unconsumed_tail
        if not inflater.eof:
            yield inflater.flush()
            return
        # Several gzip members may follow one another; trailing padding is not one.
        data = inflater.unused_data if window_bits > zlib.MAX_WBITS else b""
        if not data.startswith(b"\x1f\x8b"):
            return


def _brotli_pieces(data: bytes) -> Iterator[bytes]:
    decoder = brotli.Decompressor()
    yield cast(bytes, decoder.process(data, output_buffer_limit=_STEP))
    while not decoder.is_finished() and not decoder.can_accept_more_data():
        yield cast(bytes, decoder.process(b"", output_buffer_limit=_STEP))


def _zstd_pieces(data: bytes) -> Iterator[bytes]:
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    with decoder.stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
        while piece := reader.read(_STEP):
            yield piece
