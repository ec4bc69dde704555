"""Engine values as message bodies and back. A body that does not fit raises TransferError."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast, get_args

import numpy as np

from deepinfer_engine.core.pictures import Picture, picture_digest
from deepinfer_engine.core.types import (
    Constraint,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    TrafficClass,
    Usage,
)
from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd.wire import Body, Xid

T = TypeVar("T")

PIXEL_PIECE_BYTES = 4 << 20
MAX_PIXEL_BYTES = 512 << 20
"""Of all pictures of one request."""
_PICTURE_FIELDS = ("start", "length", "width", "height", "digest")


def reading(read: Callable[[Body], T], body: Body) -> T:
    """Run a reader on a peer's body; a missing or misshapen field becomes a TransferError."""
    try:
        return read(body)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise TransferError(f"a message of the peer lacks or misuses a field: {error!r}") from None


def xid_body(xid: Xid) -> Body:
    return {"rid": xid.rid, "attempt": xid.attempt}


def read_xid(body: Body) -> Xid:
    rid, attempt = body["rid"], body["attempt"]
    if not isinstance(rid, str) or not isinstance(attempt, int) or not 0 <= attempt < 1 << 16:
        raise ValueError(f"xid {rid!r}/{attempt!r}")
    return Xid(rid, attempt)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as raw little-endian int32."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype="<i4").tolist())


def request_body(request: GenerateRequest) -> Body:
    """Everything but the tokens, which travel as raw bytes beside it, and the pixels of pictures,
    which travel before it."""
    sampling = dataclasses.asdict(request.sampling)
    body: Body = {
        "sampling": sampling,
        "salt": request.salt,
        "traffic_class": request.traffic_class,
    }
    if request.pictures:
        body["pictures"] = [[getattr(p, f) for f in _PICTURE_FIELDS] for p in request.pictures]
    return body


def read_request(
    body: Body, xid: Xid, tokens: tuple[int, ...], pixels: bytes | None = None
) -> GenerateRequest:
    """`pixels`: of all pictures, one behind the other; None where they are not needed."""
    traffic_class = body["traffic_class"]
    if traffic_class not in get_args(TrafficClass):
        raise ValueError(f"traffic class {traffic_class!r}")
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    sampling: dict[str, Any] = {k: v for k, v in body["sampling"].items() if k in known}
    sampling["stop_token_ids"] = tuple(int(t) for t in sampling.get("stop_token_ids", ()))
    constraint = sampling.get("constraint")
    sampling["constraint"] = None if constraint is None else _read_constraint(constraint)
    sampling["logit_bias"] = tuple((int(t), float(b)) for t, b in sampling.get("logit_bias", ()))
    return GenerateRequest(
        request_id=xid.rid,
        token_ids=tokens,
        sampling=SamplingParams(**sampling),
        salt=str(body["salt"]),
        traffic_class=cast(TrafficClass, traffic_class),
        pictures=_read_pictures(body.get("pictures", ()), pixels),
    )


def pixel_pieces(request: GenerateRequest) -> Iterator[memoryview]:
    """The pixels of all pictures in pieces that fit a control frame."""
    for picture in request.pictures:
        view = memoryview(picture.pixels)
        for start in range(0, len(view), PIXEL_PIECE_BYTES):
            yield view[start : start + PIXEL_PIECE_BYTES]


def _read_pictures(rows: Sequence[Any], pixels: bytes | None) -> tuple[Picture, ...]:
    pictures: list[Picture] = []
    at = 0
    for row in rows:
        start, length, width, height = map(int, row[:4])
        digest = bytes(row[4])
        size = 3 * width * height
        if min(start, length, width, height) < 0 or len(digest) != 32:
            raise ValueError(f"picture {row!r}")
        if pixels is None:
            own = b""
        else:
            own = pixels[at : at + size]
            if picture_digest(width, height, own) != digest:
                raise ValueError(f"the pixels of a {width} x {height} picture are not those sent")
            at += size
        pictures.append(Picture(start, length, width, height, digest, own))
    if pixels is not None and at != len(pixels):
        raise ValueError(f"{len(pixels)} bytes of pixels for pictures of {at}")
    return tuple(pictures)


def _read_constraint(body: Body) -> Constraint:
    grammar, prefix, needed = body["grammar"], body["prefix"], body["needed"]
    if not (isinstance(grammar, str) and isinstance(prefix, str) and isinstance(needed, bool)):
        raise TypeError("a constraint is two texts and a flag")
    return Constraint(grammar, prefix, needed)


def logprobs_body(logprobs: Sequence[TokenLogprob]) -> list[Any]:
    return [[one.token, one.logprob, [list(pair) for pair in one.top]] for one in logprobs]


def read_logprobs(rows: list[Any]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(int(token), float(lp), tuple((int(t), float(p)) for t, p in top))
        for token, lp, top in rows
    )


def usage_body(usage: Usage) -> Body:
    return dataclasses.asdict(usage)


def read_usage(body: Body) -> Usage:
    known = {field.name for field in dataclasses.fields(Usage)}
    return Usage(**{name: int(value) for name, value in body.items() if name in known})


def read_finish(value: Any) -> FinishReason | None:
    if value is not None and value not in get_args(FinishReason):
        raise ValueError(f"finish reason {value!r}")
    return cast("FinishReason | None", value)
