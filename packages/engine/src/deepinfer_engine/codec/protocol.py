"""What the server needs from a prompt codec; `recipe_codec.py` has it from deepinfer_recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deepinfer_engine.codec.errors import ChatProtocol
from deepinfer_engine.codec.errors import Protocol as WireProtocol
from deepinfer_engine.core.pictures import Picture
from deepinfer_engine.core.types import FinishReason, SamplingParams, TokensEvent, TrafficClass


@dataclass(frozen=True, slots=True)
class WireEvent:
    """One server-sent event: its `event:` name (None for an unnamed one) and its `data:` line."""

    name: str | None
    data: str


@dataclass(frozen=True, slots=True)
class NextTurn:
    """What the model goes on from when the server ran its tools."""

    token_ids: tuple[int, ...]
    pictures: tuple[Picture, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Part:
    """One of the answers that a request asks for: the prompt's tokens and how to continue them."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt_logprobs: int | None = None
    """As `GenerateRequest.prompt_logprobs`."""


class AnswerEncoder(Protocol):
    """Turns the tokens of one answer into its protocol's events. Single use, in this call order:
    `start`, `tokens`..., `finish`; after `finish`, `body` is the answer in one piece. While it
    `waits` after `finish`: `run_tools`, and unless it is `finished` then, `next_turn` and again."""

    @property
    def finished(self) -> bool:
        """True once a stop sequence ended the answer: whatever the engine still sends is not part
        of it.
        """
        ...

    def start(
        self, prompt_tokens: int, cached_tokens: int, details: Mapping[str, int | str]
    ) -> list[WireEvent]:
        """`details`: more of what the usage tells about the cached tokens."""
        ...

    def tokens(self, event: TokensEvent) -> list[WireEvent]: ...

    def finish(self, reason: FinishReason) -> list[WireEvent]:
        """The closing events, end marker included; raises EngineError for a reason without a wire
        name.
        """
        ...

    @property
    def waits(self) -> bool:
        """Whether the model called tools of the server, and the answer goes on behind them."""
        ...

    async def run_tools(self, generated: int) -> list[WireEvent]:
        """Run those tools; generated: tokens of the answer so far."""
        ...

    def next_turn(self) -> NextTurn: ...

    @property
    def keeps(self) -> bool:
        """Whether the client wants the finished answer kept."""
        ...

    def keep(self) -> None:
        """Put the finished answer into the store; blocks. Raises EngineUnavailable."""
        ...

    def body(self) -> str:
        """The complete response as JSON."""
        ...


class PreparedRequest(Protocol):
    """A request that passed validation: a prompt, and how to continue it."""

    @property
    def model(self) -> str: ...

    @property
    def stream(self) -> bool: ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """One for each answer; most requests ask for one."""
        ...

    @property
    def pictures(self) -> tuple[Picture, ...]: ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """Fields of the body that were ignored, by name."""
        ...

    @property
    def unenforced(self) -> bool:
        """Whether calls are not held to the schemas of the tools, for what that would cost."""
        ...

    @property
    def traffic_class(self) -> TrafficClass: ...

    @property
    def user_id(self) -> str | None: ...

    @property
    def constraint_param(self) -> str:
        """The field of the body that `sampling.constraint` comes from."""
        ...

    def encoders(self, response_id: str) -> Sequence[AnswerEncoder]:
        """One for each part. They share the response: any of them gives its whole `body` when all
        are finished.
        """
        ...


class KeptResponses(Protocol):
    """Responses answers that are kept for their owners. Methods block; they raise
    EngineUnavailable when the store cannot be used.
    """

    def get(self, owner: str, response_id: str) -> dict[str, Any] | None:
        """The response object."""
        ...

    def input_items(
        self, owner: str, response_id: str, *, limit: int, after: str | None, order: str
    ) -> dict[str, Any] | None:
        """A page of what its request brought. Raises InvalidRequest naming the parameter."""
        ...

    def delete(self, owner: str, response_id: str) -> bool: ...


class Tokenising(Protocol):
    """Where long texts are tokenised: in a process of their own, for one request."""

    def encode(self, text: str, special_ranges: Sequence[tuple[int, int]] | None) -> list[int]:
        """Ids of a prompt with its special ranges, or (None) of a text in which special spellings
        count. Blocks. Raises InvalidRequest, EngineUnavailable."""
        ...


class Codec(Protocol):
    """Protocol bodies to prompts, tokens to protocol bodies. Thread-safe.

    tokenising: what tokenises long texts; None: the calling thread.
    """

    @property
    def blocks(self) -> bool:
        """Whether `prepare` and `count_tokens` may take long for a small body: it may bring, or
        name, pictures."""
        ...

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names requests may use; the first one is canonical."""
        ...

    @property
    def kept_responses(self) -> KeptResponses | None:
        """The store of Responses answers, None where nothing is kept."""
        ...

    @property
    def tokenizer_path(self) -> Path | None:
        """The file that a process of its own can tokenise by, None where there is none."""
        ...

    def body_bytes(self, max_model_len: int) -> int | None:
        """No body longer than this holds a prompt that fits; None where that cannot be said."""
        ...

    def prepare(
        self,
        protocol: WireProtocol,
        body: bytes,
        max_model_len: int,
        *,
        owner: str = "",
        tokenising: Tokenising | None = None,
    ) -> PreparedRequest:
        """Parse, validate, render, tokenise. Raises InvalidRequest, UnknownModel, PromptTooLong;
        a prompt that cannot fit is refused by its bytes, before it is tokenised.

        owner: whose kept answers the request may go on from. With a store this may block.
        """
        ...

    def count_tokens(
        self, protocol: ChatProtocol, body: bytes, *, tokenising: Tokenising | None = None
    ) -> int:
        """Prompt tokens of a request body, without the limits that need a running engine."""
        ...

    def tokenize(self, text: str, *, tokenising: Tokenising | None = None) -> list[int]:
        """Plain text to ids; special-token spellings become their ids, nothing is added."""
        ...

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Ids to text, special tokens spelled out. Raises InvalidRequest for an unknown id."""
        ...
