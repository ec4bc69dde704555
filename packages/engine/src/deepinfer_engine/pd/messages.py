"""Engine values as message bodies and back. A body that does not fit raises TransferError."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from deepinfer_engine.core.pictures import Picture, picture_digest
from deepinfer_engine.core.sampling_params import validate
from deepinfer_engine.core.types import (
    Constraint,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from deepinfer_engine.core.windows import MAX_GENERATION, Prefix
from deepinfer_engine.errors import RequestError, TransferError
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


def token_array(data: bytes) -> npt.NDArray[np.int32]:
    """Raises TransferError for bytes that are no whole ids."""
    if len(data) % 4:
        raise TransferError(f"{len(data)} bytes are no token ids")
    return np.frombuffer(data, dtype="<i4")


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
        "resumed": request.resumed,
        "timeout_s": request.timeout_s,
    }
    if request.pictures:
        body["pictures"] = [[getattr(p, f) for f in _PICTURE_FIELDS] for p in request.pictures]
    return body


def read_request(
    body: Body, xid: Xid, tokens: tuple[int, ...], pixels: bytes | None = None
) -> GenerateRequest:
    """The request of a body that its schema has passed. `pixels`: of all pictures, one behind the
    other; None where they are not needed."""
    sampling: dict[str, Any] = dict(body["sampling"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    constraint = sampling["constraint"]
    sampling["constraint"] = None if constraint is None else Constraint(**constraint)
    sampling["logit_bias"] = tuple((t, float(b)) for t, b in sampling["logit_bias"])
    return GenerateRequest(
        request_id=xid.rid,
        token_ids=tokens,
        sampling=SamplingParams(**sampling),
        salt=str(body["salt"]),
        traffic_class=body["traffic_class"],
        prompt_logprobs=body.get("prompt_logprobs"),
        resumed=body["resumed"],
        timeout_s=body.get("timeout_s"),
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


def check_request(request: GenerateRequest, vocab_size: int, *, prompt_len: int) -> None:
    """Whether a worker may let this request into a step, whoever sent it. Raises RequestError.

    prompt_len: of the prompt, whose tokens a decode worker does not have yet.
    """
    if prompt_len < 1:
        raise RequestError("the prompt is empty")
    tokens = request.token_ids
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise RequestError(f"the prompt holds tokens outside 0..{vocab_size - 1}")
    validate(request.sampling, vocab_size)
    if request.sampling.seed is None:
        raise RequestError("a request comes to a worker with a seed")
    if request.resumed >= prompt_len:
        raise RequestError(f"{request.resumed} of {prompt_len} prompt tokens cannot be output")
    end = 0
    for picture in request.pictures:
        if picture.start < end or picture.length < 1 or picture.end > prompt_len:
            raise RequestError("the pictures do not lie one after the other in the prompt")
        end = picture.end


def logprobs_body(logprobs: Sequence[TokenLogprob]) -> list[Any]:
    return [[one.token, one.logprob, [list(pair) for pair in one.top]] for one in logprobs]


def read_logprobs(rows: list[Any]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(int(token), float(lp), tuple((int(t), float(p)) for t, p in top))
        for token, lp, top in rows
    )


def cached_body(prefix: Prefix) -> Body:
    return {
        "cached_tokens": prefix.n_tokens,
        "replayed_tokens": prefix.replayed,
        "window": prefix.window,
        "generation": min(prefix.generation, MAX_GENERATION),
    }


def read_cached(body: Body) -> Prefix:
    n_tokens, replayed = int(body["cached_tokens"]), int(body["replayed_tokens"])
    if replayed > n_tokens:
        raise ValueError(f"{replayed} of {n_tokens} cached tokens cannot have run again")
    return Prefix(n_tokens, n_tokens - replayed, body["window"], int(body["generation"]))


def usage_body(usage: Usage) -> Body:
    return dataclasses.asdict(usage)


def read_usage(body: Body) -> Usage:
    return Usage(**body)
