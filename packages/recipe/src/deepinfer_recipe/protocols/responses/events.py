"""Responses: events of a streamed answer, and the complete answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.conversation.inference import InferenceFinishReason, PromptUsage
from deepinfer_recipe.conversation.policy import PARITY, Policy
from deepinfer_recipe.protocols.common.custom_input import CustomInput
from deepinfer_recipe.protocols.common.generator import CallIds, ChunkGenerator, Ending
from deepinfer_recipe.protocols.common.stream_event import StreamEvent, maker
from deepinfer_recipe.protocols.responses.echo import ResponsesEcho

ItemKind = Literal["reasoning", "message", "function_call", "custom_tool_call"]
_INCOMPLETE = {
    InferenceFinishReason.Length: "max_output_tokens",
    InferenceFinishReason.ContentFilter: "content_filter",
}
_ID_PREFIX: dict[ItemKind, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
# The event that carries more of each kind of item, and the one that closes its text.
_DELTA: dict[ItemKind, str] = {
    "reasoning": "response.reasoning_text.delta",
    "message": "response.output_text.delta",
    "function_call": "response.function_call_arguments.delta",
    "custom_tool_call": "response.custom_tool_call_input.delta",
}


Seal = Callable[[str], str | None]


class ResponsesStreamEvent(StreamEvent):
    """A Responses event consumed by response accumulation."""

    __slots__ = ()


_event = maker(ResponsesStreamEvent)


def usage_of(
    prompt: PromptUsage, output_tokens: int, reasoning_tokens: int | None
) -> dict[str, Any]:
    """The usage object of Responses."""
    return {
        "input_tokens": prompt.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": prompt.prompt_cache_hit_tokens,
            **prompt.details,
        },
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens or 0},
        "total_tokens": prompt.prompt_tokens + output_tokens,
    }


def response_object(
    id: str, model: str, created: int, echo: ResponsesEcho, **changes: Any
) -> dict[str, Any]:
    """A response object; `changes` are the fields that differ from a fresh one."""
    fields = echo.fields
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "content_filters": None,
        "error": None,
        "frequency_penalty": 0.0,
        "incomplete_details": None,
        "instructions": fields["instructions"],
        "max_output_tokens": fields["max_output_tokens"],
        "max_tool_calls": None,
        "model": model,
        "moderation": None,
        "output": [],
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "previous_response_id": fields.get("previous_response_id"),
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
        "reasoning": fields["reasoning"],
        "safety_identifier": None,
        "service_tier": "default",
        "store": fields.get("store", False),
        "temperature": fields["temperature"],
        "text": fields["text"],
        "tool_choice": fields["tool_choice"],
        "tools": fields["tools"],
        "top_logprobs": fields["top_logprobs"],
        "top_p": fields["top_p"],
        "truncation": "disabled",
        "usage": None,
        "user": fields["user"],
        "metadata": fields.get("metadata", {}),
        **changes,
    }


class ResponsesChunkGenerator(ChunkGenerator[ResponsesStreamEvent]):
    """Makes the events of one answer: output items that open on first text and close in turn.

    thinking_mode: whether the answer should begin with thinking.
    seal: makes the `encrypted_content` of a reasoning item of its text; without one a
        placeholder stands there.
    custom_tools: names of tools whose one string argument is reported as plain input.
    created: Unix time stamped on the response, now by default.
    """

    __slots__ = (
        "_calls",
        "_created",
        "_custom_input",
        "_custom_tools",
        "_delta_kind",
        "_echo",
        "_head",
        "_id",
        "_item",
        "_items",
        "_kind",
        "_logprobs",
        "_middle",
        "_model",
        "_namespaces",
        "_now",
        "_policy",
        "_seal",
        "_sequence",
        "_texts",
        "_thinking",
    )

    def __init__(
        self,
        id: str,
        model: str,
        *,
        echo: ResponsesEcho | None = None,
        namespace_tool_map: dict[str, tuple[str, str]] | None = None,
        custom_tools: Iterable[str] = (),
        thinking_mode: bool = False,
        seal: Seal | None = None,
        policy: Policy = PARITY,
        created: int | None = None,
        call_ids: CallIds | None = None,
    ) -> None:
        super().__init__(call_ids, thinks=thinking_mode)
        self._thinking = thinking_mode
        self._id = id
        self._model = model
        self._echo = echo or ResponsesEcho()
        self._namespaces = dict(namespace_tool_map or {})
        self._custom_tools = frozenset(custom_tools)
        self._policy: Policy = policy
        self._seal = seal
        self._now = (lambda: int(time.time())) if created is None else (lambda: created)
        self._created = self._now()
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._item: dict[str, Any] = {}
        self._kind: ItemKind | None = None
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._calls = 0
        self._custom_input = CustomInput()
        self._delta_kind = self._head = self._middle = ""

    def _copy(self, **changes: Any) -> ResponsesChunkGenerator:
        self.consume()
        new = ResponsesChunkGenerator(
            self._id,
            self._model,
            echo=changes.get("echo", self._echo),
            namespace_tool_map=changes.get("namespaces", self._namespaces),
            custom_tools=self._custom_tools,
            thinking_mode=self._thinking,
            seal=self._seal,
            policy=self._policy,
            call_ids=self._call_ids,
        )
        new._now = self._now
        new._created = self._created
        return new

    def with_namespace_tool_map(
        self, namespace_tool_map: dict[str, tuple[str, str]]
    ) -> ResponsesChunkGenerator:
        """Consume this generator and construct one that splits namespace tool names."""
        return self._copy(namespaces=namespace_tool_map)

    def with_echo(self, echo: ResponsesEcho) -> ResponsesChunkGenerator:
        """Consume this generator and construct one whose responses report the settings."""
        return self._copy(echo=echo)

    def _emit(self, kind: str, payload: dict[str, Any], data: Any = None) -> None:
        event = {"type": kind, **payload, "sequence_number": self._sequence}
        self._sequence += 1
        self.out.append(ResponsesStreamEvent(kind, compact_json(event), data=data))

    def _emit_text(self, kind: str, payload: dict[str, Any], text: str, data: Any = None) -> None:
        """Emit an event that repeats a whole text: in `payload` it is empty and the last `text`.

        The text is put into the JSON only when that is asked for.
        """
        event = compact_json({"type": kind, **payload, "sequence_number": self._sequence})
        self._sequence += 1
        # Inside strings quotes are escaped, so these characters are a member.
        head, _, tail = event.rpartition('"text":""')
        self.out.append(ResponsesStreamEvent(kind, f'{head}"text":', text, tail, data))

    def _response(self, **changes: Any) -> dict[str, Any]:
        return response_object(self._id, self._model, self._created, self._echo, **changes)

    def start(self, usage: PromptUsage, fingerprint: str | None) -> None:
        self.prompt_usage = usage
        response = self._response()
        self._emit("response.created", {"response": response}, response)
        self._emit("response.in_progress", {"response": response}, response)

    # -- items -------------------------------------------------------------------------

    def _open(self, kind: ItemKind, **fields: Any) -> None:
        self._close()
        number = len(self._items)
        item_id = f"{_ID_PREFIX[kind]}_{self._id}_{number}"
        self._kind = kind
        self._texts = []
        self._logprobs = []
        self._item = {"type": kind, "id": item_id, "status": "in_progress", **fields}
        place = {"item_id": item_id, "output_index": number}
        self._emit(
            "response.output_item.added", {"item": self._item, "output_index": number}, self._item
        )
        if kind in ("reasoning", "message"):
            part = self._part("")
            self._emit("response.content_part.added", {"content_index": 0, **place, "part": part})
        index = '"content_index":0,' if kind in ("reasoning", "message") else ""
        logprobs = '"logprobs":[],' if kind == "message" else ""
        self._delta_kind = _DELTA[kind]
        self._head = f'{{"type":"{self._delta_kind}",{index}"delta":'
        self._middle = (
            f',"item_id":{compact_json(item_id)},{logprobs}"output_index":{number},'
            '"sequence_number":'
        )

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "annotations": [], "logprobs": self._logprobs, "text": text}

    def _delta(self, text: str) -> None:
        tail = f"{self._middle}{self._sequence}}}"
        self._sequence += 1
        self._texts.append(text)
        self.out.append(_event(self._delta_kind, self._head, text, tail, None))

    def _close(self, *, status: str = "completed", before_call: bool = False) -> None:
        kind = self._kind
        if kind is None:
            return
        text = "".join(self._texts)
        item = {**self._item, "status": status}
        place = {"item_id": item["id"], "output_index": len(self._items)}
        if kind == "reasoning":
            if self._seal is not None:
                item["encrypted_content"] = self._seal(text)
            self._close_text("reasoning_text", item, place, text)
        elif kind == "message":
            if before_call:
                item["phase"] = "commentary"
            self._close_text("output_text", item, place, text)
        elif kind == "function_call":
            self._close_call("response.function_call_arguments.done", "arguments", item, text)
        else:
            self._close_call("response.custom_tool_call_input.done", "input", item, text)
        self._kind = None

    def _close_text(
        self, name: str, item: dict[str, Any], place: dict[str, Any], text: str
    ) -> None:
        part = self._part("")
        whole = {**item, "content": [{**part, "text": text}]}
        start = {"content_index": 0, **place}
        logprobs = {"logprobs": self._logprobs} if name == "output_text" else {}
        self._emit_text(f"response.{name}.done", {**start, **logprobs, "text": ""}, text)
        self._emit_text("response.content_part.done", {**start, "part": part}, text)
        done = {"item": {**item, "content": [part]}, "output_index": len(self._items)}
        self._items.append(whole)
        self._emit_text("response.output_item.done", done, text, whole)

    def _close_call(self, kind: str, field: str, item: dict[str, Any], text: str) -> None:
        number = len(self._items)
        self._emit(kind, {field: text, "item_id": item["id"], "output_index": number})
        item[field] = text
        if self._logprobs:
            item["logprobs"] = self._logprobs
        self._items.append(item)
        self._emit("response.output_item.done", {"item": item, "output_index": number}, item)

    def reasoning(self, text: str) -> None:
        self._misses_thinking = False
        if self._kind != "reasoning":
            self._close()
            sealed = f"{self._id}-{len(self._items)}" if self._seal is None else None
            self._open("reasoning", content=[], summary=[], encrypted_content=sealed)
        self._delta(text)

    def content(self, text: str) -> None:
        if self._kind != "message":
            self._open("message", role="assistant", phase="final_answer", content=[])
        self._delta(text)

    def content_with_logprobs(self, text: str, entries: list[dict[str, Any]]) -> None:
        if self._kind != "message":
            self._open("message", role="assistant", phase="final_answer", content=[])
        self._texts.append(text)
        self._logprobs += entries
        payload = {
            "content_index": 0,
            "delta": text,
            "item_id": self._item["id"],
            "logprobs": entries,
            "output_index": len(self._items),
        }
        self._emit(_DELTA["message"], payload)

    def call_started(self, name: str) -> None:
        self._close(before_call=True)
        call_id = self.call_id(self._calls)
        self._calls += 1
        if name in self._custom_tools:
            self._custom_input = CustomInput()
            namespace, own = self._namespaces.get(name, (None, name))
            more = {} if namespace is None else {"namespace": namespace}
            self._open("custom_tool_call", call_id=call_id, name=own, **more, input="")
            return
        namespace, own = self._namespaces.get(name, (None, name))
        fields = {"name": own} if namespace is None else {"name": own, "namespace": namespace}
        self._open("function_call", call_id=call_id, **fields, arguments="")

    def call_arguments(self, piece: str, raw: str | None = None) -> None:
        if self._kind == "custom_tool_call":
            text = self._custom_input.feed(piece, raw)
            if text:
                self._delta(text)
        else:
            self._delta(piece)

    def call_arguments_with_logprobs(
        self, piece: str, raw: str | None, entries: list[dict[str, Any]]
    ) -> None:
        is_custom = self._kind == "custom_tool_call"
        text = self._custom_input.feed(piece, raw) if is_custom else piece
        if not text:
            return
        self._texts.append(text)
        self._logprobs += entries
        place = {"item_id": self._item["id"], "output_index": len(self._items)}
        self._emit(
            _DELTA[self._kind or "function_call"], {"delta": text, "logprobs": entries, **place}
        )

    def call_ended(self, meant: str | None = None) -> None:
        if meant is not None and self._kind == "function_call":
            self._texts = [meant]
        # The reference leaves the last call open, so that it counts as cut short when the
        # answer is, although it was complete.
        if self._policy.closes_last_call:
            self._close()

    def insert(self, block: Mapping[str, Any]) -> None:
        self._close()
        number = len(self._items)
        item = dict(block)
        place = {"item_id": item.get("id"), "output_index": number}
        opened = {**item, "status": "in_progress"}
        self._emit("response.output_item.added", {"item": opened, "output_index": number}, opened)
        if item.get("type") == "web_search_call":
            self._emit("response.web_search_call.in_progress", place)
            self._emit("response.web_search_call.searching", place)
            if item.get("status") == "completed":
                self._emit("response.web_search_call.completed", place)
        self._items.append(item)
        self._emit("response.output_item.done", {"item": item, "output_index": number}, item)

    def end(self, ending: Ending) -> None:
        reason = None if ending.stop_sequence is not None else _INCOMPLETE.get(ending.reason)
        status = "completed" if reason is None else "incomplete"
        self._close(status=status)
        usage = usage_of(self.prompt_usage, ending.completion_tokens, ending.reasoning_tokens)
        response = self._response(
            status=status,
            completed_at=self._now(),
            incomplete_details=None if reason is None else {"reason": reason},
            output=self._items,
            usage=usage,
        )
        self._emit(f"response.{status}", {"response": response}, response)


class ResponsesResponse:
    """A complete Responses answer, accumulated event by event."""

    __slots__ = ("_response",)

    def __init__(
        self, id: str, model: str, created: int, prompt_tokens: int, prompt_cache_hit_tokens: int
    ) -> None:
        prompt = PromptUsage(
            prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=prompt_cache_hit_tokens
        )
        self._response = response_object(
            id, model, created, ResponsesEcho(), usage=usage_of(prompt, 0, None)
        )

    def accumulate(self, chunk: ResponsesStreamEvent) -> None:
        """Apply this event's delta to the response."""
        kind = chunk.kind
        if kind == "response.output_item.done":
            self._response = {
                **self._response,
                "output": [*self._response["output"], chunk.data],
            }
        elif kind in ("response.created", "response.completed", "response.incomplete"):
            self._response = chunk.data

    def to_dict(self) -> dict[str, Any]:
        """The response as plain data."""
        return json.loads(self.to_json())

    def to_json(self) -> str:
        """The response as compact JSON text."""
        return compact_json(self._response)

    @staticmethod
    def sse_event_name(chunk: ResponsesStreamEvent) -> str | None:
        """Return the SSE event name of `chunk`."""
        return chunk.kind

    @staticmethod
    def sse_done_data() -> str | None:
        """Return None: a Responses stream has no final data message."""
        return None
