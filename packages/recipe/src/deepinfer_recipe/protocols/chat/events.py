"""Chat Completions: chunks of a streamed answer, and the complete answer."""

from __future__ import annotations

import time
from typing import Any

from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.conversation.inference import InferenceFinishReason, PromptUsage
from deepinfer_recipe.conversation.policy import PARITY, Policy
from deepinfer_recipe.protocols.common.generator import CallIds, ChunkGenerator, Ending
from deepinfer_recipe.protocols.common.stream_event import StreamEvent, maker

_REASONS = {
    InferenceFinishReason.Stop: "stop",
    InferenceFinishReason.Length: "length",
    InferenceFinishReason.ContentFilter: "content_filter",
}


class ChatCompletionChunk(StreamEvent):
    """A Chat Completions chunk consumed by response accumulation."""

    __slots__ = ()


_event = maker(ChatCompletionChunk)
_NOT_FINISHED = ',"logprobs":null,"finish_reason":null}]'


def usage_of(prompt: PromptUsage, completion_tokens: int, reasoning_tokens: int | None) -> Any:
    """The usage object of Chat Completions."""
    hit = prompt.prompt_cache_hit_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": prompt.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": hit, **prompt.details},
    }
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    usage["prompt_cache_hit_tokens"] = hit
    usage["prompt_cache_miss_tokens"] = max(0, prompt.prompt_tokens - hit)
    return usage


class UsageLedger:
    """Sums the usage of several answers to one prompt, which is counted once."""

    def __init__(self, answers: int = 1) -> None:
        self._open = answers
        self._completion_tokens = 0
        self._reasoning_tokens: int | None = None

    def close_one(self, prompt: PromptUsage, ending: Ending) -> dict[str, Any] | None:
        """Count an answer that ended; the usage of all once the last one did."""
        self._open -= 1
        self._completion_tokens += ending.completion_tokens
        if ending.reasoning_tokens is not None:
            self._reasoning_tokens = (self._reasoning_tokens or 0) + ending.reasoning_tokens
        if self._open > 0:
            return None
        return usage_of(prompt, self._completion_tokens, self._reasoning_tokens)


class ChatCompletionChunkGenerator(ChunkGenerator[ChatCompletionChunk]):
    """Makes the chunks of one choice of an answer.

    starts_in_reasoning: whether the answer begins with thinking (a continued answer does not).
    index: the choice that the chunks belong to.
    ledger: shared by the generators of all choices; the last to end reports the usage.
    created: Unix time stamped on the chunks, now by default.
    """

    __slots__ = (
        "_arguments_head",
        "_arguments_tail",
        "_before_delta",
        "_calls",
        "_content_head",
        "_content_tail",
        "_fingerprint",
        "_include_usage",
        "_index",
        "_ledger",
        "_policy",
        "_reasoning_head",
        "_reasoning_tail",
        "_resumes",
        "_said",
        "_stamp",
        "_starts_in_reasoning",
        "_thinking",
    )

    def __init__(
        self,
        id: str,
        model: str,
        *,
        thinking_mode: bool,
        starts_in_reasoning: bool = True,
        include_usage: bool = False,
        policy: Policy = PARITY,
        index: int = 0,
        ledger: UsageLedger | None = None,
        created: int | None = None,
        call_ids: CallIds | None = None,
    ) -> None:
        super().__init__(call_ids, thinks=thinking_mode and starts_in_reasoning)
        self._stamp = {
            "id": id,
            "object": "chat.completion.chunk",
            "created": int(time.time()) if created is None else created,
            "model": model,
        }
        self._thinking = thinking_mode
        self._starts_in_reasoning = starts_in_reasoning
        self._include_usage = include_usage
        self._policy: Policy = policy
        self._index = index
        self._ledger = ledger or UsageLedger()
        self._calls = 0
        self._said = False
        """Whether the answer has text yet."""
        self._resumes = False
        """Whether the next text follows calls."""

    def start(self, usage: PromptUsage, fingerprint: str | None) -> None:
        self.prompt_usage = usage
        self._fingerprint = fingerprint
        head = {**self._stamp, "system_fingerprint": fingerprint}
        self._before_delta = (
            f'{compact_json(head)[:-1]},"choices":[{{"index":{self._index},"delta":'
        )
        self._content_head, self._content_tail = self._around(
            {"content": None, "reasoning_content": None} if self._thinking else {"content": None},
            "content",
        )
        self._reasoning_head, self._reasoning_tail = self._around(
            {"content": None, "reasoning_content": None}, "reasoning_content"
        )
        reasons = self._thinking and self._starts_in_reasoning
        delta: dict[str, Any] = {"role": "assistant", "content": None if reasons else ""}
        if self._thinking:
            delta["reasoning_content"] = "" if reasons else None
        self._emit("role", delta, data=reasons)

    def _choice(
        self,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        usage: Any = None,
        logprobs: Any = None,
    ) -> str:
        ending = {"logprobs": logprobs, "finish_reason": finish_reason}
        end = f",{compact_json(ending)[1:]}]" if logprobs or finish_reason else _NOT_FINISHED
        # The reference reports usage at the end even unasked.
        if self._include_usage or (usage is not None and self._policy.reports_usage_unasked):
            end += f',"usage":{compact_json(usage)}'
        return f"{self._before_delta}{compact_json(delta)}{end}}}"

    def _around(self, delta: dict[str, Any], key: str) -> tuple[str, str]:
        """The JSON of a chunk before and behind the text of `delta[key]`."""
        mark = f'"{key}":null'
        head, _, tail = self._choice(delta).partition(mark)
        return f'{head}"{key}":', tail

    def _emit(self, kind: str, delta: dict[str, Any], data: Any = None) -> None:
        chunk = ChatCompletionChunk(kind, self._choice(delta), data=(self._index, data))
        self.out.append(chunk)

    def reasoning(self, text: str) -> None:
        self._misses_thinking = False
        self.out.append(
            _event("reasoning", self._reasoning_head, text, self._reasoning_tail, self._index)
        )

    def content(self, text: str) -> None:
        if self._resumes:
            text = self._resumed(text)
        self._said = True
        self.out.append(
            _event("content", self._content_head, text, self._content_tail, self._index)
        )

    def reasoning_with_logprobs(self, text: str, entries: list[dict[str, Any]]) -> None:
        self._misses_thinking = False
        delta = {"content": None, "reasoning_content": text}
        self._with_logprobs("reasoning_content", delta, text, entries)

    def _resumed(self, text: str) -> str:
        """Text behind calls goes on where the text before them ended: two paragraphs."""
        self._resumes = False
        return f"\n\n{text}" if self._said else text

    def content_with_logprobs(self, text: str, entries: list[dict[str, Any]]) -> None:
        if self._resumes:
            text = self._resumed(text)
        self._said = True
        delta: dict[str, Any] = {"content": text}
        if self._thinking:
            delta["reasoning_content"] = None
        self._with_logprobs("content", delta, text, entries)

    def _with_logprobs(
        self, key: str, delta: dict[str, Any], text: str, entries: list[dict[str, Any]]
    ) -> None:
        chunk = self._choice(delta, logprobs={key: entries})
        data = (self._index, (key, text, entries))
        self.out.append(ChatCompletionChunk("logprobs", chunk, data=data))

    def call_started(self, name: str) -> None:
        number = self._calls
        self._calls += 1
        self._resumes = True
        function = {"name": name, "arguments": ""}
        call = {
            "index": number,
            "id": self.call_id(number),
            "type": "function",
            "function": function,
        }
        self._emit("call", {"tool_calls": [call]}, data=call)
        piece = {"index": number, "function": {"arguments": None}}
        self._arguments_head, self._arguments_tail = self._around(
            {"tool_calls": [piece]}, "arguments"
        )

    def call_arguments(self, piece: str, raw: str | None = None) -> None:
        self.out.append(
            _event("arguments", self._arguments_head, piece, self._arguments_tail, self._index)
        )

    def call_ended(self, meant: str | None = None) -> None:
        if meant is None:
            return
        # What was streamed holds a key twice, and readers take the last; the complete answer
        # holds it once.
        piece = self.out.pop().text or ""
        number = self._calls - 1
        delta = {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}
        data = (self._index, (number, meant))
        self.out.append(ChatCompletionChunk("call_meant", self._choice(delta), data=data))

    def call_arguments_with_logprobs(
        self, piece: str, raw: str | None, entries: list[dict[str, Any]]
    ) -> None:
        number = self._calls - 1
        delta = {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}
        told = {"tool_calls": [{"index": number, "arguments": entries}]}
        data = (self._index, (number, piece, entries))
        chunk = self._choice(delta, logprobs=told)
        self.out.append(ChatCompletionChunk("call_logprobs", chunk, data=data))

    def end(self, ending: Ending) -> None:
        reason = _REASONS[ending.reason]
        if ending.stop_sequence is not None:
            reason = "stop"
        elif self._calls and ending.reason is InferenceFinishReason.Stop:
            reason = "tool_calls"
        usage = self._ledger.close_one(self.prompt_usage, ending)
        delta: dict[str, Any] = {"content": ""}
        if self._thinking:
            delta["reasoning_content"] = None
        # OpenAI's clients expect usage in a chunk of its own, without choices.
        is_separate = self._include_usage and self._policy.usage_in_own_chunk
        text = self._choice(delta, finish_reason=reason, usage=None if is_separate else usage)
        data = (self._index, (reason, usage, self._fingerprint))
        self.out.append(ChatCompletionChunk("finish", text, data=data))
        if is_separate and usage is not None:
            chunk = {
                **self._stamp,
                "system_fingerprint": self._fingerprint,
                "choices": [],
                "usage": usage,
            }
            self.out.append(
                ChatCompletionChunk("usage", compact_json(chunk), data=(self._index, None))
            )


class _Choice:
    """One choice of the complete answer, growing."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.thinking = False
        self.calls: list[dict[str, Any]] = []
        self.arguments: list[list[str]] = []
        self.finish_reason: str | None = None
        self.logprobs: dict[str, list[dict[str, Any]]] = {}
        self.call_logprobs: dict[int, list[dict[str, Any]]] = {}

    def all_logprobs(self) -> dict[str, Any] | None:
        calls = [
            {"index": number, "arguments": entries}
            for number, entries in sorted(self.call_logprobs.items())
        ]
        return {**self.logprobs, **({"tool_calls": calls} if calls else {})} or None

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.thinking or self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(pieces)}}
                for call, pieces in zip(self.calls, self.arguments, strict=True)
            ]
        return message


class ChatCompletionResponse:
    """A complete Chat Completions answer, accumulated chunk by chunk."""

    __slots__ = ("_choices", "_fingerprint", "_stamp", "_usage")

    def __init__(
        self, id: str, model: str, created: int, prompt_tokens: int, prompt_cache_hit_tokens: int
    ) -> None:
        self._stamp = {"id": id, "object": "chat.completion", "created": created, "model": model}
        prompt = PromptUsage(
            prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=prompt_cache_hit_tokens
        )
        self._usage = usage_of(prompt, 0, None)
        self._fingerprint: str | None = None
        self._choices: dict[int, _Choice] = {}

    def accumulate(self, chunk: ChatCompletionChunk) -> None:
        """Apply this chunk's delta to the response."""
        text, data, kind = chunk.text, chunk.data, chunk.kind
        if text is not None:
            choice = self._choices.get(data) or self._choice(data)
            if kind == "content":
                choice.content.append(text)
            elif kind == "reasoning":
                choice.reasoning.append(text)
            else:
                choice.arguments[-1].append(text)
            return
        choice = self._choice(data[0])
        if kind == "role":
            choice.thinking = data[1]
        elif kind == "logprobs":
            key, piece, entries = data[1]
            (choice.content if key == "content" else choice.reasoning).append(piece)
            choice.logprobs.setdefault(key, []).extend(entries)
        elif kind == "call_logprobs":
            number, piece, entries = data[1]
            choice.arguments[number].append(piece)
            choice.call_logprobs.setdefault(number, []).extend(entries)
        elif kind == "call_meant":
            number, meant = data[1]
            choice.arguments[number] = [meant]
        elif kind == "call":
            choice.calls.append(data[1])
            choice.arguments.append([])
        elif kind == "finish":
            choice.finish_reason, usage, self._fingerprint = data[1]
            if usage is not None:
                self._usage = usage

    def _choice(self, index: int) -> _Choice:
        return self._choices.setdefault(index, _Choice())

    def to_dict(self) -> dict[str, Any]:
        """The response as plain data."""
        return {
            **self._stamp,
            "choices": [
                {
                    "index": index,
                    "message": choice.message(),
                    "logprobs": choice.all_logprobs(),
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in sorted(self._choices.items())
            ],
            "usage": self._usage,
            "system_fingerprint": self._fingerprint,
        }

    def to_json(self) -> str:
        """The response as compact JSON text."""
        return compact_json(self.to_dict())

    @staticmethod
    def sse_event_name(chunk: ChatCompletionChunk) -> str | None:
        """Return the SSE event name of `chunk`: None, an unnamed data event."""
        return None

    @staticmethod
    def sse_done_data() -> str | None:
        """Return the data of the final SSE message, `[DONE]`."""
        return "[DONE]"
