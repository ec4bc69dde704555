"""What goes to the backend beside the prompt, and what comes back from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

Logprob: TypeAlias = tuple[float, Sequence[tuple[int, float]]]
"""Log probability of the sampled token and `(token id, log probability)` of the likeliest."""


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """A constraint on the model output that the backend can enforce by constrained decoding.

    kind: `json`, `regex`, `tool_call`, or `tool_call_required`.
    schema: the schema as compact JSON, the regular expression, the tool list as a compact
        JSON array of Chat Completions function tools (with `defer_loading: true` on deferred
        ones), or an empty string for any JSON value.
    """

    kind: Literal["json", "regex", "tool_call", "tool_call_required"]
    schema: str


@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """Inference parameters extracted by protocol conversion.

    Conversion resolves `temperature` and `top_p`, but for models with a chat template, which have
    their own defaults. Other unspecified parameters are
    None; `ConversationRequest.resolve_max_tokens` supplies the default `max_tokens` once the
    prompt is encoded.

    max_tokens: maximum number of output tokens.
    top_logprobs: likeliest alternatives reported per output token, in `[0, 20]`.
    seed: sampling seed in `[0, 2^63)`; the caller chooses an unspecified one.
    n: number of answers to sample; more than one only in the extended profile.
    frequency_penalty, presence_penalty: in [-2, 2]; 0 in the parity profile, which ignores
        them.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    seed: int | None = None
    output_constraint: OutputConstraint | None = None
    n: int = 1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUsage:
    """Prompt-side token counts from the backend.

    details: what else a server tells of the prompt's way through its cache, by name; shown beside
        the cached tokens where a protocol has a place for it.
    """

    prompt_tokens: int = 0
    prompt_cache_hit_tokens: int = 0
    details: Mapping[str, int | str] = field(default_factory=dict[str, "int | str"])


class InferenceFinishReason(Enum):
    """Backend finish reasons; output parsing determines the protocol finish reason."""

    Stop = "Stop"
    Length = "Length"
    ContentFilter = "ContentFilter"

    def __repr__(self) -> str:
        return f"InferenceFinishReason.{self.name}"


@dataclass(frozen=True, slots=True)
class _Details:
    """What chunks other than text carry."""

    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[Logprob, ...] | None = None
    finish_reason: InferenceFinishReason | None = None
    prompt_usage: PromptUsage | None = None
    system_fingerprint: str | None = None


_NO_DETAILS = _Details()


class InferenceChunk:
    """One backend update, constructed with `ready`, `text`, `tokens`, or `finish`.

    kind: which of the four constructors built this chunk.
    content: the text of a `text` chunk.
    token_count: the number of tokens this chunk's content accounts for; text chunks only.
    """

    __slots__ = ("_details", "content", "kind", "token_count")

    def __init__(
        self,
        kind: Literal["ready", "text", "tokens", "finish"],
        content: str | None = None,
        token_count: int | None = None,
        details: _Details = _NO_DETAILS,
    ) -> None:
        self.kind: Literal["ready", "text", "tokens", "finish"] = kind
        self.content = content
        self.token_count = token_count
        self._details = details

    @staticmethod
    def ready(
        *, prompt_usage: PromptUsage | None = None, system_fingerprint: str | None = None
    ) -> InferenceChunk:
        """The prompt is in: what it cost."""
        usage = prompt_usage or PromptUsage()
        details = _Details(prompt_usage=usage, system_fingerprint=system_fingerprint)
        return InferenceChunk("ready", details=details)

    @staticmethod
    def text(content: str, token_count: int = 0) -> InferenceChunk:
        """A text chunk of `content` and the number of tokens it accounts for."""
        return InferenceChunk("text", content, token_count)

    @staticmethod
    def tokens(
        token_ids: Sequence[int], logprobs: Sequence[Logprob] | None = None
    ) -> InferenceChunk:
        """A chunk of the token ids of one backend output.

        `logprobs` holds one `(logprob, top_logprobs)` pair per token id.
        """
        pairs = None if logprobs is None else tuple(logprobs)
        return InferenceChunk(
            "tokens", details=_Details(token_ids=tuple(token_ids), logprobs=pairs)
        )

    @staticmethod
    def finish(finish_reason: InferenceFinishReason) -> InferenceChunk:
        """The backend is done."""
        return InferenceChunk("finish", details=_Details(finish_reason=finish_reason))

    @property
    def token_ids(self) -> list[int] | None:
        """The token ids of a `tokens` chunk."""
        ids = self._details.token_ids
        return None if ids is None else list(ids)

    @property
    def logprobs(self) -> list[Logprob] | None:
        """The log probabilities of a `tokens` chunk, if it has any."""
        pairs = self._details.logprobs
        return None if pairs is None else list(pairs)

    @property
    def finish_reason(self) -> InferenceFinishReason | None:
        """The reason of a `finish` chunk."""
        return self._details.finish_reason

    @property
    def prompt_usage(self) -> PromptUsage | None:
        """The prompt counts of a `ready` chunk."""
        return self._details.prompt_usage

    @property
    def system_fingerprint(self) -> str | None:
        """The backend's fingerprint, on a `ready` chunk."""
        return self._details.system_fingerprint

    def __repr__(self) -> str:
        return f"InferenceChunk(kind={self.kind!r})"
