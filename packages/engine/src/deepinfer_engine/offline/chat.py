"""Conversations offline: prompts as the server writes them, answers as it reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepinfer_engine.codec.choose import open_codec
from deepinfer_engine.codec.protocol import PreparedRequest
from deepinfer_engine.core.types import FinishReason, TokensEvent
from deepinfer_engine.errors import RequestError
from deepinfer_engine.offline.params import SamplingParams
from deepinfer_engine.offline.results import Completion

_NAME = "offline"


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation that passed validation."""

    request: PreparedRequest
    params: SamplingParams

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.request.parts[0].token_ids

    def finished(self, done: Completion) -> Completion:
        """With the message that the tokens spell, for every answer."""
        return replace(
            done,
            message=self._message(done.token_ids, done.finish_reason),
            others=tuple(
                replace(other, message=self._message(other.token_ids, other.finish_reason))
                for other in done.others
            ),
        )

    def _message(self, tokens: tuple[int, ...], reason: FinishReason) -> dict[str, Any]:
        (encoder,) = self.request.encoders("offline")
        encoder.start(len(self.token_ids), 0, {})
        encoder.tokens(TokensEvent(0, tokens))
        encoder.finish(reason)
        return json.loads(encoder.body())["choices"][0]["message"]


class ChatCodec:
    """The codec of a model's directory, fed with Chat Completions bodies."""

    def __init__(self, directory: Path, max_model_len: int) -> None:
        self._codec = open_codec(directory, (_NAME,))
        self._max_model_len = max_model_len

    def conversations(self, messages: Any) -> list[Sequence[dict[str, Any]]]:
        """One conversation or several, as a list of them. Raises RequestError."""
        wrong = RequestError(
            "messages: wanted a list of messages {role, content}, or a list of such lists",
            param="messages",
        )
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise wrong
        items: list[Any] = list(messages)
        if all(isinstance(m, dict) for m in items):
            return [items]
        if all(isinstance(c, Sequence) and not isinstance(c, str) for c in items):
            return items
        raise wrong

    def prepare(
        self,
        conversation: Sequence[dict[str, Any]],
        params: SamplingParams,
        tools: Sequence[dict[str, Any]] | None,
        thinking: bool | None,
    ) -> PreparedChat:
        """Raises RequestError as the server would."""
        body: dict[str, Any] = {"model": _NAME, "messages": list(conversation)}
        if tools is not None:
            body["tools"] = list(tools)
        if thinking is not None:
            body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        try:
            encoded = json.dumps(body).encode()
        except (TypeError, ValueError) as error:
            raise RequestError(f"messages: not JSON: {error}", param="messages") from None
        request = self._codec.prepare("chat", encoded, self._max_model_len)
        constraint = params.constraint or request.parts[0].sampling.constraint
        return PreparedChat(request, replace(params, constraint=constraint))
