"""Answers in which the model calls tools of the server: turn by turn, one answer for the client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deepinfer_engine.adapters.recipe import (
    Answer,
    Conversation,
    ConversationRequest,
    InferenceChunk,
    ServerToolPolicy,
)
from deepinfer_engine.codec.protocol import NextTurn, WireEvent
from deepinfer_engine.codec.recipe_codec import FINISH, RecipeEncoder, RecipeRequest
from deepinfer_engine.core.pictures import Picture
from deepinfer_engine.core.types import FinishReason, SamplingParams
from deepinfer_engine.core.web_search import ToolOutcome, ToolRun

_ANSWER_TOKENS = 256
"""Kept free for the answer when results are sized."""


class RecipeToolEncoder(RecipeEncoder):
    """One answer of several turns; see `codec.protocol.AnswerEncoder`."""

    def __init__(self, prepared: RecipeRequest, response_id: str, tools: ToolRun) -> None:
        self._tools = tools
        self._prompt_ids = prepared.token_ids
        self._pictures: tuple[Picture, ...] = prepared.pictures
        self._generated = 0
        super().__init__(prepared, response_id)

    def _open(self, generator: Any) -> None:
        self._answer: Answer[WireEvent] = Answer(self, generator, self._prepared.codec.tokenizer)

    @property
    def finished(self) -> bool:
        return self._answer.finished

    @property
    def waits(self) -> bool:
        return bool(self._answer.pending_calls)

    def finish(self, reason: FinishReason) -> list[WireEvent]:
        out: list[WireEvent] = []
        if not self.finished and not self.waits:
            self._check(reason)
            out += self._push(InferenceChunk.finish(FINISH[reason]))
        return out if self.waits else out + self._done()

    async def run_tools(self, generated: int) -> list[WireEvent]:
        self._generated = generated
        out = await self._answer.run_server_tools(self._run)
        return out + self._done() if self.finished else out

    def next_turn(self) -> NextTurn:
        return NextTurn(self._prompt_ids, self._pictures, self._sampling())

    # What `Answer` asks of its host.

    @property
    def request(self) -> ConversationRequest:
        return self._prepared.request

    def frames(self, events: list[Any], *, is_last: bool) -> list[WireEvent]:
        return self._wire(events)

    def render(self, conversation: Conversation) -> bool:
        token_ids, self._pictures = self._prepared.codec.encode_again(
            conversation, self._prepared.pictures
        )
        self._prompt_ids = token_ids
        return self._room() > 0 and self._left() > 0

    def _push(self, chunk: InferenceChunk) -> list[WireEvent]:
        return self._answer.push(chunk)

    async def _run(self, name: str, input: dict[str, Any], policy: ServerToolPolicy) -> ToolOutcome:
        room = self._room() - min(self._left(), _ANSWER_TOKENS)
        return await self._tools.run(name, input, policy.tool_use_id, max(1, room // 2))

    def _room(self) -> int:
        return self._prepared.max_model_len - len(self._prompt_ids)

    def _left(self) -> int:
        return self._prepared.sampling.max_tokens - self._generated

    def _sampling(self) -> SamplingParams:
        sampling = self._prepared.sampling
        forced = self.request.inference_options.output_constraint
        if forced is not None and forced.kind == "tool_call_required":
            # The call that the client demanded is made; the answer to it is free.
            sampling = replace(sampling, constraint=None)
        return replace(sampling, max_tokens=min(self._left(), self._room()))
