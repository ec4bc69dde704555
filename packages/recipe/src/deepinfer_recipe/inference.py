"""What goes to the backend beside the prompt, and what comes back from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    Conversion always resolves `temperature` and `top_p`. Other unspecified parameters are
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
    """Prompt-side token counts from the backend."""

    prompt_tokens: int = 0
    prompt_cache_hit_tokens: int = 0


class InferenceFinishReason(Enum):
    """Backend finish reasons; output parsing determines the protocol finish reason."""

    Stop = "Stop"
    Length = "Length"
    ContentFilter = "ContentFilter"

    def __repr__(self) -> str:
        return f"InferenceFinishReason.{self.name}"


class InferenceChunk:
    """One backend update, constructed with `ready`, `text`, `tokens`, or `finish`."""

    __slots__ = (
        "_content",
        "_finish_reason",
        "_fingerprint",
        "_kind",
        "_logprobs",
        "_token_count",
        "_token_ids",
        "_usage",
    )

    def __init__(self, kind: Literal["ready", "text", "tokens", "finish"]) -> None:
        self._kind: Literal["ready", "text", "tokens", "finish"] = kind
        self._content: str | None = None
        self._token_count: int | None = None
        self._token_ids: tuple[int, ...] | None = None
        self._logprobs: tuple[Logprob, ...] | None = None
        self._finish_reason: InferenceFinishReason | None = None
        self._usage: PromptUsage | None = None
        self._fingerprint: str | None = None

    @staticmethod
    def ready(
        *, prompt_usage: PromptUsage | None = None, system_fingerprint: str | None = None
    ) -> InferenceChunk:
        """The prompt is in: what it cost."""
        chunk = InferenceChunk("ready")
        chunk._usage = prompt_usage or PromptUsage()
        chunk._fingerprint = system_fingerprint
        return chunk

    @staticmethod
    def text(content: str, token_count: int = 0) -> InferenceChunk:
        """A text chunk of `content` and the number of tokens it accounts for."""
        chunk = InferenceChunk.__new__(InferenceChunk)
        chunk._kind = "text"
        chunk._content = content
        chunk._token_count = token_count
        return chunk

    @staticmethod
    def tokens(
        token_ids: Sequence[int], logprobs: Sequence[Logprob] | None = None
    ) -> InferenceChunk:
        """A chunk of the token ids of one backend output.

        `logprobs` holds one `(logprob, top_logprobs)` pair per token id.
        """
        chunk = InferenceChunk("tokens")
        chunk._token_ids = tuple(token_ids)
        chunk._logprobs = None if logprobs is None else tuple(logprobs)
        return chunk

    @staticmethod
    def finish(finish_reason: InferenceFinishReason) -> InferenceChunk:
        """The backend is done."""
        chunk = InferenceChunk("finish")
        chunk._finish_reason = finish_reason
        return chunk

    @property
    def kind(self) -> Literal["ready", "text", "tokens", "finish"]:
        """Which of the four constructors built this chunk."""
        return self._kind

    @property
    def content(self) -> str | None:
        """The text of a `text` chunk."""
        return self._content if self._kind == "text" else None

    @property
    def token_ids(self) -> list[int] | None:
        """The token ids of a `tokens` chunk."""
        ids = self._token_ids if self._kind == "tokens" else None
        return None if ids is None else list(ids)

    @property
    def logprobs(self) -> list[Logprob] | None:
        """The log probabilities of a `tokens` chunk, if it has any."""
        pairs = self._logprobs if self._kind == "tokens" else None
        return None if pairs is None else list(pairs)

    @property
    def finish_reason(self) -> InferenceFinishReason | None:
        """The reason of a `finish` chunk."""
        return self._finish_reason if self._kind == "finish" else None

    @property
    def prompt_usage(self) -> PromptUsage | None:
        """The prompt counts of a `ready` chunk."""
        return self._usage if self._kind == "ready" else None

    @property
    def token_count(self) -> int | None:
        """The number of tokens this chunk's content accounts for; text chunks only."""
        return self._token_count if self._kind == "text" else None

    @property
    def system_fingerprint(self) -> str | None:
        """The backend's fingerprint, on a `ready` chunk."""
        return self._fingerprint if self._kind == "ready" else None

    def __repr__(self) -> str:
        return f"InferenceChunk(kind={self._kind!r})"
