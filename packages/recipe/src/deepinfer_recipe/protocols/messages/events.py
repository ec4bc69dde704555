"""Messages: events of a streamed answer, and the complete answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.conversation.inference import InferenceFinishReason, PromptUsage
from deepinfer_recipe.protocols.common.generator import CallIds, ChunkGenerator, Ending
from deepinfer_recipe.protocols.common.stream_event import StreamEvent, maker

_REASONS = {
    InferenceFinishReason.Stop: "end_turn",
    InferenceFinishReason.Length: "max_tokens",
    InferenceFinishReason.ContentFilter: "refusal",
}
BlockKind = Literal["thinking", "text", "tool_use"]
_GROWING = ("thinking", "text", "tool_use")


class MessagesStreamEvent(StreamEvent):
    """A Messages event consumed by response accumulation."""

    __slots__ = ()


_event = maker(MessagesStreamEvent)


def usage_of(prompt: PromptUsage, output_tokens: int) -> dict[str, Any]:
    """The usage object of Messages: `input_tokens` are those the cache did not hold."""
    hit = prompt.prompt_cache_hit_tokens
    return {
        "input_tokens": max(0, prompt.prompt_tokens - hit),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": hit,
        "output_tokens": output_tokens,
        "service_tier": "standard",
    }


class MessagesChunkGenerator(ChunkGenerator[MessagesStreamEvent]):
    """Makes the events of one answer: blocks that open on first need and close in turn."""

    __slots__ = (
        "_calls",
        "_head",
        "_id",
        "_index",
        "_model",
        "_open",
        "_pinged",
        "_signature",
        "_thinking",
    )

    def __init__(
        self, id: str, model: str, thinking_mode: bool, *, call_ids: CallIds | None = None
    ) -> None:
        super().__init__(call_ids, thinks=thinking_mode)
        self._id = id
        self._model = model
        self._thinking = thinking_mode
        self._signature = id
        self._open: BlockKind | None = None
        self._index = -1
        self._head = ""
        self._calls = 0
        self._pinged = False

    def with_signature(self, signature: str) -> MessagesChunkGenerator:
        """Consume this generator and construct one with the supplied signature.

        The new generator emits `signature` at the end of each thinking block. The default
        signature is the response id.
        """
        self.consume()
        new = MessagesChunkGenerator(self._id, self._model, self._thinking, call_ids=self._call_ids)
        new._signature = signature
        return new

    def _emit(self, kind: str, payload: dict[str, Any], data: Any = None) -> None:
        self.out.append(
            MessagesStreamEvent(kind, compact_json({"type": kind, **payload}), data=data)
        )

    def start(self, usage: PromptUsage, fingerprint: str | None) -> None:
        self.prompt_usage = usage
        message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(usage, 0),
        }
        self._emit("message_start", {"message": message}, data=message["usage"])
        if self._thinking:
            self._open_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})

    def _open_block(self, kind: BlockKind, block: dict[str, Any]) -> None:
        self._close_block()
        self._open = kind
        self._index += 1
        self._emit("content_block_start", {"index": self._index, "content_block": block}, block)
        if not self._pinged:
            self._pinged = True
            self._emit("ping", {})
        delta = {
            "thinking": '"type":"thinking_delta","thinking":',
            "text": '"type":"text_delta","text":',
            "tool_use": '"type":"input_json_delta","partial_json":',
        }[kind]
        self._head = f'{{"type":"content_block_delta","index":{self._index},"delta":{{{delta}'

    def _close_block(self) -> None:
        if self._open is None:
            return
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature}
            self._emit(
                "content_block_delta", {"index": self._index, "delta": delta}, self._signature
            )
        self._emit("content_block_stop", {"index": self._index})
        self._open = None

    def reasoning(self, text: str) -> None:
        self._misses_thinking = False
        if self._open != "thinking":
            self._open_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        self.out.append(_event("content_block_delta", self._head, text, "}}", None))

    def content(self, text: str) -> None:
        if self._open != "text":
            self._open_block("text", {"type": "text", "text": ""})
        self.out.append(_event("content_block_delta", self._head, text, "}}", None))

    def call_started(self, name: str) -> None:
        call_id = self.call_id(self._calls)
        self._calls += 1
        block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        self._open_block("tool_use", block)

    def call_arguments(self, piece: str, raw: str | None = None) -> None:
        self.out.append(_event("content_block_delta", self._head, piece, "}}", None))

    def call_ended(self, meant: str | None = None) -> None:
        self._close_block()

    def insert(self, block: Mapping[str, Any]) -> None:
        self._close_block()
        self._index += 1
        self._emit("content_block_start", {"index": self._index, "content_block": block}, block)
        if not self._pinged:
            self._pinged = True
            self._emit("ping", {})
        self._emit("content_block_stop", {"index": self._index})

    def end(self, ending: Ending) -> None:
        self._close_block()
        reason = _REASONS[ending.reason]
        if ending.stop_sequence is not None:
            reason = "stop_sequence"
        elif self._calls and ending.reason is InferenceFinishReason.Stop:
            reason = "tool_use"
        elif ending.paused:
            reason = "pause_turn"
        delta = {"stop_reason": reason, "stop_sequence": ending.stop_sequence}
        usage = usage_of(self.prompt_usage, ending.completion_tokens)
        if ending.server_tool_use is not None:
            usage["server_tool_use"] = ending.server_tool_use
        self._emit("message_delta", {"delta": delta, "usage": usage}, (delta, usage))
        self._emit("message_stop", {})


def _parsed_input(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class MessagesResponse:
    """A complete Messages answer, accumulated event by event."""

    __slots__ = ("_blocks", "_head", "_stop", "_texts", "_usage")

    def __init__(
        self, id: str, model: str, created: int, prompt_tokens: int, prompt_cache_hit_tokens: int
    ) -> None:
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        prompt = PromptUsage(
            prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=prompt_cache_hit_tokens
        )
        self._usage = usage_of(prompt, 0)
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []

    def accumulate(self, chunk: MessagesStreamEvent) -> None:
        """Apply this event's delta to the response."""
        if chunk.text is not None:
            self._texts[-1].append(chunk.text)
        elif chunk.kind == "content_block_start":
            self._blocks.append(dict(chunk.data))
            self._texts.append([])
        elif chunk.kind == "content_block_delta":
            self._blocks[-1]["signature"] = chunk.data
        elif chunk.kind == "message_start":
            self._usage = chunk.data
        elif chunk.kind == "message_delta":
            self._stop, self._usage = chunk.data

    def to_dict(self) -> dict[str, Any]:
        """The response as plain data."""
        content: list[dict[str, Any]] = []
        for block, pieces in zip(self._blocks, self._texts, strict=True):
            text = "".join(pieces)
            kind = block["type"]
            if kind not in _GROWING:
                content.append(block)
                continue
            value = _parsed_input(text) if kind == "tool_use" else text
            content.append({**block, "input" if kind == "tool_use" else kind: value})
        return {**self._head, "content": content, **self._stop, "usage": self._usage}

    def to_json(self) -> str:
        """The response as compact JSON text."""
        return compact_json(self.to_dict())

    @staticmethod
    def sse_event_name(chunk: MessagesStreamEvent) -> str | None:
        """Return the SSE event name of `chunk`."""
        return chunk.kind

    @staticmethod
    def sse_done_data() -> str | None:
        """Return None: a Messages stream has no final data message."""
        return None
