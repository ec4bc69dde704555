"""Engine values as message bodies and back. A body that does not fit raises TransferError."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, get_args

import numpy as np

from deepinfer_engine.core.types import (
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
    """Everything but the tokens, which travel as raw bytes beside it."""
    sampling = dataclasses.asdict(request.sampling)
    return {
        "sampling": sampling,
        "salt": request.salt,
        "traffic_class": request.traffic_class,
    }


def read_request(body: Body, xid: Xid, tokens: tuple[int, ...]) -> GenerateRequest:
    traffic_class = body["traffic_class"]
    if traffic_class not in get_args(TrafficClass):
        raise ValueError(f"traffic class {traffic_class!r}")
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    sampling: dict[str, Any] = {k: v for k, v in body["sampling"].items() if k in known}
    sampling["stop_token_ids"] = tuple(int(t) for t in sampling.get("stop_token_ids", ()))
    sampling["logit_bias"] = tuple((int(t), float(b)) for t, b in sampling.get("logit_bias", ()))
    return GenerateRequest(
        request_id=xid.rid,
        token_ids=tokens,
        sampling=SamplingParams(**sampling),
        salt=str(body["salt"]),
        traffic_class=cast(TrafficClass, traffic_class),
    )


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
