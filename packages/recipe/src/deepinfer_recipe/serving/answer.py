"""One answer of an exchange under way: model text in, server-sent events out."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from deepinfer_recipe.conversation.conversation import Conversation
from deepinfer_recipe.conversation.inference import (
    InferenceChunk,
    InferenceFinishReason,
    Logprob,
    PromptUsage,
)
from deepinfer_recipe.conversation.messages import AssistantMessage, Message, ToolMessage
from deepinfer_recipe.conversation.parsing_options import ThinkingInitialStage
from deepinfer_recipe.conversation.server_tools import (
    RunTool,
    ServerToolOutcome,
    ServerToolPolicy,
    failed,
)
from deepinfer_recipe.prompts.tokenizer import Tokenizer
from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest
from deepinfer_recipe.protocols.common.generator import ChunkGenerator
from deepinfer_recipe.protocols.common.server_calls import ServerCall, TurnGenerator
from deepinfer_recipe.serving.stream import StreamProcessor

log = logging.getLogger(__name__)

FinishReason: TypeAlias = Literal["stop", "length", "content_filter"]

_REASONS: dict[FinishReason, InferenceFinishReason] = {
    "stop": InferenceFinishReason.Stop,
    "length": InferenceFinishReason.Length,
    "content_filter": InferenceFinishReason.ContentFilter,
}
_PATIENCE = 2
"""Turns in a row that a model may ask for what it cannot have before the answer ends."""
_ID_PREFIX = {"anthropic": "srvtoolu_", "openai": "ws_"}


F = TypeVar("F")


class AnswerHost(Protocol[F]):
    """What an answer needs around it: its `Exchange`."""

    @property
    def request(self) -> ConversationRequest:
        """The converted request."""
        ...

    def frames(self, events: list[Any], *, is_last: bool) -> list[F]:
        """Events of the protocol as what is sent; `is_last` with the last ones of an answer."""
        ...

    def render(self, conversation: Conversation) -> bool:
        """Make a conversation the next prompt; False where it leaves no room for an answer."""
        ...


class Answer(Generic[F]):
    """One answer of an exchange under way: model text in, server-sent events out.

    Call `ready` once, `text` for every piece of output, `finish` at the end. Every call
    returns complete SSE frames, ready to send when the request asked for a stream; when it
    did not, ignore them and send `Exchange.response()` at the end.

    With server tools (`WebSearchBehavior.Run`) the answer may not be over at its end: while
    there are `pending_calls`, call `run_server_tools`, and if the answer is not `finished` then,
    generate on from `Exchange.rendered`, again with `ready`, `text` and `finish`.
    """

    __slots__ = (
        "_conversation",
        "_exchange",
        "_generator",
        "_processor",
        "_refused_turns",
        "_tokenizer",
        "_tool_usage",
        "_turn",
        "_uses",
    )

    def __init__(
        self,
        exchange: AnswerHost[F],
        generator: ChunkGenerator[Any],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """tokenizer: decodes chunks of token ids, for hosts that `push` those."""
        self._exchange = exchange
        self._tokenizer = tokenizer
        self._generator = generator
        self._conversation = exchange.request.conversation
        self._turn: TurnGenerator | None = None
        self._uses: dict[str, int] = {}
        self._tool_usage: dict[str, int] = {}
        self._refused_turns = 0
        options = exchange.request.parsing_options
        if exchange.request.server_tools:
            generator = self._turn = self._new_turn()
        self._processor: StreamProcessor[Any] = StreamProcessor(generator, options, tokenizer)

    def _new_turn(self) -> TurnGenerator:
        tools = self._exchange.request.server_tools
        spent = None if self._turn is None else self._turn.spent(self._tool_usage)
        return TurnGenerator(self._generator, tools, self._new_id, spent)

    def _new_id(self) -> str:
        tools = self._exchange.request.server_tools
        dialect = next(iter(tools.values())).dialect
        return _ID_PREFIX[dialect] + secrets.token_hex(12)

    @property
    def finished(self) -> bool:
        """Whether the answer is complete; true early when a stop sequence matched."""
        return self._processor.finished and not self.pending_calls

    @property
    def pending_calls(self) -> list[ServerCall]:
        """The calls of server tools that the answer waits for."""
        turn = self._turn
        return [] if turn is None or turn.ending is None else list(turn.calls)

    @property
    def tool_call_repairs(self) -> list[str]:
        """What had to be mended in malformed tool calls, in order."""
        return self._processor.tool_call_repairs

    def ready(
        self,
        *,
        prompt_tokens: int,
        cached_tokens: int = 0,
        fingerprint: str | None = None,
        details: Mapping[str, int | str] | None = None,
    ) -> list[F]:
        """The prompt is in: what it cost, how much of it the cache held, and `details` of that."""
        usage = PromptUsage(
            prompt_tokens=prompt_tokens,
            prompt_cache_hit_tokens=cached_tokens,
            details=details or {},
        )
        return self.push(InferenceChunk.ready(prompt_usage=usage, system_fingerprint=fingerprint))

    def text(self, text: str, tokens: int = 1) -> list[F]:
        """The next piece of output and the number of tokens it took.

        Output behind a matched stop sequence is ignored; stop the backend when `finished`.
        """
        if self._processor.finished:
            return []
        return self.push(InferenceChunk.text(text, tokens))

    def tokens(self, ids: Sequence[int], logprobs: Sequence[Logprob] | None = None) -> list[F]:
        """The next token ids of the output, with their log probabilities if they are wanted.

        The exchange needs a tokenizer. Output behind a matched stop sequence is ignored.
        """
        if self._processor.finished:
            return []
        return self.push(InferenceChunk.tokens(ids, logprobs))

    def finish(self, reason: FinishReason = "stop") -> list[F]:
        """The backend is done; nothing happens if a stop sequence already ended the answer."""
        if self._processor.finished:
            return []
        return self.push(InferenceChunk.finish(_REASONS[reason]))

    def push(self, chunk: InferenceChunk) -> list[F]:
        """Any chunk of the backend."""
        events = self._processor.push(chunk)
        return self._exchange.frames(events, is_last=self.finished)

    async def run_server_tools(self, run_tool: RunTool) -> list[F]:
        """Run the pending calls, one after the other; returns the frames with their blocks.

        `run_tool(name, input, policy)` is asked no more often than the client's limit allows;
        what it raises becomes a failed use that the model is told of. Afterwards the answer is
        `finished` (the client must answer calls of its own first, the model does not take no for
        an answer, or the results leave no room for one), or `Exchange.rendered` is the prompt to
        go on from.
        """
        turn = self._turn
        if turn is None or turn.ending is None:
            return []
        events: list[Any] = []
        self._generator.out = events
        results: list[Message] = []
        ran = False
        for call in turn.calls:
            outcome, did_run = await self._outcome(call, run_tool)
            ran = ran or did_run
            for block in outcome.wire_blocks:
                self._generator.insert(block)
            texts = [str(b["text"]) for b in outcome.blocks_for_model if b.get("type") == "text"]
            results.append(ToolMessage("\n\n".join(texts), call.id))
            for name, count in outcome.usage.items():
                self._tool_usage[name] = self._tool_usage.get(name, 0) + count
        self._refused_turns = 0 if ran else self._refused_turns + 1
        is_paused = self._refused_turns >= _PATIENCE
        if turn.calls_client or is_paused or not self._go_on(turn, results):
            turn.finish(paused=not turn.calls_client, tools=self._tool_usage)
        return self._exchange.frames(events, is_last=self.finished)

    async def _outcome(self, call: ServerCall, run_tool: RunTool) -> tuple[ServerToolOutcome, bool]:
        tool = self._exchange.request.server_tools[call.name]
        uses = self._uses.get(call.name, 0)
        policy = ServerToolPolicy(tool.dialect, tool.declaration, tool.max_uses, uses, call.id)
        if uses >= tool.max_uses:
            return failed(call.name, call.input, policy, "max_uses_exceeded"), False
        self._uses[call.name] = uses + 1
        try:
            return await run_tool(call.name, call.input, policy), True
        except Exception:
            # The answer is worth more than the search: the model goes on without it.
            log.exception("the server tool %s failed", call.name)
            return failed(call.name, call.input, policy, "unavailable"), True

    def _go_on(self, turn: TurnGenerator, results: list[Message]) -> bool:
        """Set everything up for the model's next turn; False where there is no room for it."""
        said: AssistantMessage = turn.message()
        if not self._conversation.thinking_mode:
            said = AssistantMessage(said.content, None, said.tool_calls)
        self._conversation = self._conversation.continued([said, *results])
        if not self._exchange.render(self._conversation):
            return False
        thinks = self._conversation.thinking_mode
        stage = ThinkingInitialStage.ReasoningStart if thinks else None
        options = self._exchange.request.parsing_options.at_stage(stage)
        self._turn = self._new_turn()
        self._processor = StreamProcessor(self._turn, options, self._tokenizer)
        return True
