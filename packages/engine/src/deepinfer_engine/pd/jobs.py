"""Prompts on their way to decode workers, and the messages that begin and end that way."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from deepinfer_engine.core.plan import Progress
from deepinfer_engine.core.types import GenerateRequest
from deepinfer_engine.pd import transport
from deepinfer_engine.pd.messages import (
    cached_body,
    logprobs_body,
    pack_tokens,
    read_request,
    unpack_tokens,
    xid_body,
)
from deepinfer_engine.pd.sending import Outgoing
from deepinfer_engine.pd.transport import Connection
from deepinfer_engine.pd.wire import Body, Xid


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Where the KV of a prompt's first `num_tokens` tokens is."""

    num_tokens: int
    blocks: tuple[int, ...]
    state_slot: int


@dataclass(frozen=True, slots=True)
class Found:
    """What the cache had of a prompt: its first tokens."""

    tokens: tuple[int, ...]
    generation: int


@dataclass(slots=True)
class Pixels:
    """Bytes that a router has sent for a prompt to come."""

    router: Connection
    data: bytearray = field(default_factory=bytearray)


@dataclass(eq=False, slots=True)
class Job:
    """One prompt on its way to a decode worker."""

    xid: Xid
    router: Connection
    decode_address: str
    decode_epoch: int
    out: Outgoing
    steps: asyncio.Queue[Found | ChunkDone | Progress] = field(
        default_factory=asyncio.Queue["Found | ChunkDone | Progress"]
    )
    asking: asyncio.Task[None] | None = None
    """Set while the decode worker is asked what the first token may be."""
    mask: asyncio.Future[bytes | None] | None = None
    """Its answer."""
    pusher: asyncio.Task[None] | None = None
    decode: Connection | None = None
    committed_at: float | None = None
    sent_since: float | None = None
    lease_until: float | None = None
    """When its memory goes though decode did not release it; None before COMMIT."""
    resent: set[int] = field(default_factory=set[int])
    loading: int = 0
    """How many leading blocks decode was asked to load from the cache itself."""
    loaded: asyncio.Future[int] | None = None
    """How many of them it has."""


def commit_body(job: Job, first: Progress) -> Body:
    """COMMIT: everything was sent, and this is the first token."""
    seq = first.seq
    return {
        **xid_body(job.xid),
        "n_units": len(job.out.units),
        "digest": job.out.digest,
        "tokens": pack_tokens(seq.tokens[: seq.prompt_len]),
        "first_token": first.tokens[0],
        "first_logprobs": logprobs_body(first.logprobs),
        "cached": cached_body(seq.cached),
    }


def read_prefill(body: Body, xid: Xid, pixels: bytes) -> tuple[GenerateRequest, str, int, int]:
    """Of a PREFILL: the request, address and epoch of its decode worker, the grant there."""
    request = read_request(body, xid, unpack_tokens(body["tokens"]), pixels)
    address = body["decode_address"]
    transport.parse_address(address)
    return request, address, int(body["decode_epoch"]), int(body["grant_id"])
