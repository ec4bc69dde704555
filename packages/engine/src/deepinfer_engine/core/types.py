"""The values that cross the engine's inner borders. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from deepinfer_engine.core.pictures import Picture
from deepinfer_engine.core.windows import WindowSource

FinishReason = Literal["stop", "length", "abort", "error", "insufficient_system_resource"]
TrafficClass = Literal["agent", "chat", "scratch"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output must look like. `deepinfer_engine.codec.constraints` makes them.

    grammar: a structural tag, JSON text that every worker compiles for its vocabulary.
    prefix: the part of the answer that the prompt ends with; the grammar begins before it.
    needed: False where the request is served all the same by an engine that cannot enforce.
    think_tokens: thinking ends behind so many, so that a forced call has room.
    """

    grammar: str
    prefix: str = ""
    needed: bool = True
    think_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn logits into tokens. Temperature 0 is argmax, lowest id on ties.

    Order of application: penalties (over prompt and output, drafts before the row included), logit
    bias, bans and min_tokens, constraint, temperature, top_p, top_k, min_p, softmax. Ranges are
    checked in `core.sampling_params.validate`; this type only carries them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 512
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """None: off. k >= 0: the sampled token's logprob and the k most likely, of unmodified
    logits."""
    constraint: Constraint | None = None
    """None: any text. Else every token is one that the grammar allows, whatever the logits."""
    coupled: bool | None = None
    """How drafts are verified where a temperature is set. True: the text is a function of prompt,
    parameters and seed alone. False: exact residual sampling, which accepts a little more, and
    where the text follows how many drafts were verified. None: as the engine is set."""
    priority: int = 0
    """No matter of sampling: which requests are served first, lower ones sooner."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue. `salt` separates cache users; `seed` in sampling is never None
    here."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: str = "anonymous"
    traffic_class: TrafficClass = "chat"
    timeout_s: float | None = None
    pictures: tuple[Picture, ...] = ()
    """In the order of their spans, which `token_ids` fills with the image token."""
    prompt_logprobs: int | None = None
    """As `SamplingParams.logprobs`, of every prompt token behind the first; such a prompt is always
    computed whole."""
    resumed: int = 0
    """The last so many of `token_ids` are output that a lost worker sampled: they count as output
    for penalties, minimum length and grammar. `sampling.max_tokens` counts them too."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of the unmodified logits; `top` holds (token, logprob), best
    first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens`, `replayed_tokens` (those of them that ran again
    to rebuild windows) and `window` are fixed by the prefill side alone."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    replayed_tokens: int = 0
    window: WindowSource | None = None


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Tokens `index .. index+len-1` of the output, in order and without gaps."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = field(default=())
    cached_tokens: int | None = None
    """Set on the event with index 0: what prefill found cached; Messages announces it up front."""
    replayed_tokens: int = 0
    window: WindowSource | None = None
    """With `cached_tokens`; see `Usage`."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """On the event with index 0, where the request asked for them: one for each prompt token behind
    the first."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a request went before its answer ran, in seconds.

    queued: until the engine had memory for it; with two workers, until decode had. prefill: from
    there to the first token; of a worker of its own with its queue. transferred: from the first
    token to the word that decode has the prompt's KV; 0 where nothing is transferred.
    """

    queued: float
    prefill: float
    transferred: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of a request that ended by itself. A stop token is the last token emitted."""

    reason: FinishReason
    usage: Usage
    timings: Timings | None = field(default=None, compare=False)


GenerateEvent = TokensEvent | FinishEvent
