"""Every message between router and workers, as a model that refuses what it does not know.

Peers speak one version (`wire.VERSION`), so a key that is missing, unknown or of another type is a
fault and never a newer peer's. A change here is a new version; a test holds the two together, and
`docs/protocol.json` is written from these models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer_engine.core.sampling_params import MAX_LOGPROBS
from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd.quoting import quoted
from deepinfer_engine.pd.wire import VERSION, Body, FrameType, Xid

U16 = Annotated[int, Field(ge=0, lt=1 << 16)]
U64 = Annotated[int, Field(ge=0, lt=1 << 64)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Name = Annotated[str, Field(max_length=512)]
Ids = Annotated[bytes, Field(description="token ids, raw little-endian int32")]
Hash = Annotated[bytes, Field(min_length=32, max_length=32)]
Role = Literal["router", "prefill", "decode", "encode"]
Finish = Literal["stop", "length", "abort", "error", "insufficient_system_resource"]
Encoding = Literal["own", "workers", "either"]
NextLogprob = tuple[int, float]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Hello(Message):
    """In clear, both ways: all that is said before a connection is sealed."""

    role: Role
    epoch: U64
    nonce: Hash
    public_key: Hash | None = None


class Identity(Message):
    """Who connects, and who accepts (WELCOME)."""

    engine_id: Name
    role: Role
    epoch: U64
    version: Name
    pid: Count | None = None
    model: Name | None = None
    dtype: Name | None = None
    layout_hash: Name | None = None
    block_tokens: Count | None = None
    num_blocks: Count | None = None
    max_model_len: Count | None = None
    vocab_size: Count | None = None
    nextn: Count | None = None
    windows: Name = ""
    """ip:port where other workers pull its window states."""
    store: Name = ""
    """Equal for workers whose caches read what each other wrote below memory."""
    encoding: Encoding | None = None
    """Of a prefill worker: where its pictures are encoded."""


class Attempted(Message):
    """A message about one attempt at one request."""

    rid: Name
    attempt: U16


class Grammar(Message):
    grammar: str
    prefix: str
    needed: bool
    think_tokens: Count | None = None


class Finite(Message):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sampling(Finite):
    """`core.types.SamplingParams`, field by field."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int | None
    constraint: Grammar | None
    coupled: bool | None
    priority: int


class Request(Attempted):
    epoch: U64
    sampling: Sampling
    salt: str
    traffic_class: Literal["agent", "chat", "scratch"]
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The request's own limit, by which it is ordered among others; the router ends it."""
    resumed: Count = 0
    """Last tokens of the prompt that were sampled as output by a worker that is lost."""
    pictures: tuple[tuple[Count, Count, Count, Count, Hash], ...] = ()
    """start, length, width, height, digest"""


class Reserve(Request):
    prompt_len: Count
    layout_hash: Name


class Reserved(Attempted):
    grant_id: U64
    epoch: U64


class Busy(Attempted):
    reason: str
    retry_after_ms: Count


class Prefill(Request):
    tokens: Ids
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Wanted of each token behind the first, with so many of the likeliest."""
    decode_address: Name
    decode_epoch: U64
    grant_id: U64
    encoders: Annotated[tuple[tuple[Name, U64], ...], Field(max_length=64)] = ()
    """Address and epoch of encode workers that are ready; for prompts with pictures."""


class Pixels(Attempted):
    data: bytes


class OnePicture(Attempted):
    """About one picture of a prompt, by the grant that prefill gave for its embeddings."""

    grant_id: U64


class Encode(OnePicture):
    """Prefill to encode: send the embeddings of this picture, as units of this grant."""

    epoch: U64
    version: Name
    """Of preprocessing, weights and arithmetic: other ones give other embeddings."""
    width: Count
    height: Count
    tokens: Count
    digest: Hash
    salt: str
    """Whose picture it is, for fair turns."""
    alone: bool = False
    """A worker was lost over it: with no others in one batch."""


class PixelsWanted(OnePicture):
    """Encode to prefill: it is not cached here."""


class PicturePixels(OnePicture):
    data: bytes


class Embedded(OnePicture):
    """Encode to prefill, behind the units: they are all of it."""

    n_units: Count
    digest: U64
    dtype: Name
    rows: Count
    channels: Count
    cached: bool


class NotEmbedded(OnePicture):
    reason: Literal["request", "failed", "busy", "draining", "version", "stale"]
    message: str = ""


Window = Literal["local", "peer", "stored", "exact_replay", "bounded_replay", "miss"]


class Cached(Message):
    """What the prompt cache held: `replayed_tokens` of the cached ones ran again for windows, which
    came from `window`; `generation` bounded replays lie behind them."""

    cached_tokens: Count
    replayed_tokens: Count
    window: Window | None
    generation: Annotated[int, Field(ge=0, le=127)]


class Usage(Message):
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    drafted_tokens: Count
    accepted_tokens: Count
    replayed_tokens: Count
    window: Window | None


Logprobs = tuple[tuple[int, float, tuple[NextLogprob, ...]], ...]


class First(Attempted):
    tokens: Ids
    logprobs: Logprobs
    cached: Cached
    finish: Finish | None = None
    usage: Usage | None = None


class PromptLogprobs(Attempted):
    """Prefill to router, before FIRST and in pieces: those of the prompt's next tokens."""

    logprobs: Logprobs


class MaskWanted(Attempted):
    """Prefill to decode: what may the first token be?"""

    tokens: Ids
    """Output that the prompt ends with already, where the request is resumed."""


class Mask(Attempted):
    mask: Annotated[bytes, Field(max_length=1 << 20)] | None
    """Bits of the tokens that may come, raw little-endian int32; None: any, nothing is held."""


class Commit(Attempted):
    n_units: Count
    digest: U64
    tokens: Ids
    first_token: Count
    first_logprobs: Logprobs
    cached: Cached


class Stored(Attempted):
    """Prefill to decode: the cache that both read holds these first tokens, whole blocks; load
    them. Units of the others come meanwhile."""

    tokens: Ids
    generation: Annotated[int, Field(ge=0, le=127)]


class Loaded(Attempted):
    """So many leading blocks of them are there; send the others. COMMIT comes after it."""

    blocks: Count


class Ready(Attempted):
    token: Count
    logprobs: Logprobs
    cached: Cached


class Nack(Attempted):
    unit: Count


class Shared(Message):
    """Prefill to decode: the ring that its units lie in, where both are on one machine."""

    pid: Count
    fd: Count
    mark: Hash
    size: Count


class SharedOpen(Message):
    """Whether decode could open it; the reason where not."""

    open: bool
    reason: str = ""


class LandingWanted(Message):
    """Prefill to decode: lend a place that one-sided writes reach."""


class Landing(Message):
    """Where it is, and who the library writes to; without a size there is none, and why."""

    session: Name = ""
    address: U64 = 0
    size: Annotated[int, Field(ge=0, le=1 << 32)] = 0
    reason: str = ""


class UnitsRead(Message):
    """So many units have been read from the ring, or landing place, since it began."""

    count: Count


class Held(Message):
    """Decode to prefill: committed attempts that wait for what is not prefill's; keep their
    memory."""

    keys: Annotated[tuple[Name, ...], Field(max_length=4096)]


class Tokens(Attempted):
    index: Count
    tokens: Ids
    logprobs: Logprobs
    finish: Finish | None = None
    usage: Usage | None = None


class Abort(Attempted):
    reason: str = ""
    message: str = ""
    param: str | None = None
    prompt_tokens: Count | None = None
    max_tokens: Count | None = None
    blame: Role | None = None
    """Which side failed, where it is not the one that says so."""


class StatusReply(Attempted):
    state: str
    units_seen: Count


class Heartbeat(Message):
    counters: dict[str, float]
    gauges: dict[str, float]
    draining: bool
    trouble: str = ""
    """Why this worker should get no requests now; empty while it steps."""


class Numbered(Message):
    id: Count


class Probe(Numbered):
    """Router to prefill: can you reach this decode worker?"""

    address: Name
    epoch: U64


class Probed(Numbered):
    detail: str
    """Empty: a transfer there and back went through."""


class Ping(Numbered):
    """Prefill to decode: bytes as a transfer would send them."""

    data: bytes


class Pong(Numbered):
    digest: U64


class Members(Message):
    """Router to workers: the window addresses of all of them."""

    addresses: Annotated[tuple[Name, ...], Field(max_length=4096)]


Hashes = Annotated[bytes, Field(description="block hashes, raw little-endian uint64")]


class Cache(Message):
    """Worker to router: blocks that came to a tier of its cache, or left it. `number` counts these
    messages on a connection; `whole`: all that it holds, whatever was told before."""

    number: Count
    whole: bool
    memory: Hashes
    below: Hashes
    no_memory: Hashes
    no_below: Hashes


class CacheWanted(Message):
    """Router to worker: something was missed, tell all."""


class Drain(Message):
    """Router to worker: take nothing new (`on`), or take requests again."""

    on: bool


class Gone(Message):
    rid: Name | None = None
    attempt: U16 | None = None
    grant_id: U64 | None = None


class Unsupported(Message):
    type: int


MESSAGES: dict[FrameType, type[Message]] = {
    FrameType.HELLO: Hello,
    FrameType.IDENTITY: Identity,
    FrameType.WELCOME: Identity,
    FrameType.RESERVE: Reserve,
    FrameType.RESERVED: Reserved,
    FrameType.BUSY: Busy,
    FrameType.PREFILL: Prefill,
    FrameType.FIRST: First,
    FrameType.PROMPT_LOGPROBS: PromptLogprobs,
    FrameType.PIXELS: Pixels,
    FrameType.ENCODE: Encode,
    FrameType.PIXELS_WANTED: PixelsWanted,
    FrameType.PICTURE_PIXELS: PicturePixels,
    FrameType.EMBEDDED: Embedded,
    FrameType.NOT_EMBEDDED: NotEmbedded,
    FrameType.MASK_WANTED: MaskWanted,
    FrameType.MASK: Mask,
    FrameType.STORED: Stored,
    FrameType.LOADED: Loaded,
    FrameType.COMMIT: Commit,
    FrameType.READY: Ready,
    FrameType.RELEASED: Attempted,
    FrameType.NACK: Nack,
    FrameType.SHARED: Shared,
    FrameType.SHARED_OPEN: SharedOpen,
    FrameType.LANDING_WANTED: LandingWanted,
    FrameType.LANDING: Landing,
    FrameType.UNITS_READ: UnitsRead,
    FrameType.HELD: Held,
    FrameType.TOKENS: Tokens,
    FrameType.ABORT: Abort,
    FrameType.ABORT_ACK: Attempted,
    FrameType.STATUS: Attempted,
    FrameType.STATUS_REPLY: StatusReply,
    FrameType.HEARTBEAT: Heartbeat,
    FrameType.FLUSH: Numbered,
    FrameType.FLUSHED: Numbered,
    FrameType.PROBE: Probe,
    FrameType.PROBED: Probed,
    FrameType.PING: Ping,
    FrameType.PONG: Pong,
    FrameType.MEMBERS: Members,
    FrameType.DRAIN: Drain,
    FrameType.CACHE: Cache,
    FrameType.CACHE_WANTED: CacheWanted,
    FrameType.GONE: Gone,
    FrameType.STALE_EPOCH: Attempted,
    FrameType.UNSUPPORTED: Unsupported,
}
"""UNIT and UNIT_AT are no maps: their header is `wire.UnitHeader`."""

_VALIDATORS = {int(kind): model.__pydantic_validator__ for kind, model in MESSAGES.items()}


class BadMessage(TransferError):  # noqa: N818 - it reads as the condition it reports
    """A message that its schema refuses; `xid`: the attempt it is about, where it says so."""

    def __init__(self, message: str, kind: int, xid: Xid | None) -> None:
        super().__init__(message)
        self.kind = kind
        self.xid = xid


class _Fault(NamedTuple):
    where: str
    what: str


def check(kind: int, body: Body) -> None:
    """Raise BadMessage, naming the field, unless this is a message of that type."""
    validator = _VALIDATORS.get(kind)
    if validator is None:
        return
    try:
        validator.validate_python(body)
    except ValidationError as error:
        fault = _first(error)
        name = FrameType(kind).name
        raise BadMessage(f"{name}.{fault.where}: {fault.what}", kind, _xid(body)) from None


def _first(error: ValidationError) -> _Fault:
    one = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return _Fault(quoted(".".join(str(part) for part in one["loc"])), quoted(one["msg"]))


def _xid(body: Body) -> Xid | None:
    rid, attempt = body.get("rid"), body.get("attempt")
    whole = isinstance(rid, str) and len(rid) <= 512 and type(attempt) is int
    return Xid(rid, attempt) if whole and 0 <= attempt < 1 << 16 else None  # type: ignore[arg-type]


def json_schema() -> dict[str, Any]:
    """All messages as JSON Schema; bytes are strings there, and raw in msgpack."""
    from pydantic.json_schema import models_json_schema

    models = [(model, "validation") for model in dict.fromkeys(MESSAGES.values())]
    _, definitions = models_json_schema(models)  # type: ignore[arg-type]  # a list of pairs
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Messages between deepinfer's router and workers",
        "version": VERSION,
        "frames": {
            kind.name: {"type": int(kind), "body": f"#/$defs/{model.__name__}"}
            for kind, model in MESSAGES.items()
        },
        **definitions,
    }
