"""Completions: text or token ids in, text on. No conversation, no template, no parser.

One request may bring several prompts and ask for several answers to each; choice `p * n + i` is the
i-th answer to prompt p, as clients of the first API of this kind know it.
"""

from __future__ import annotations

import codecs
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deepinfer_engine.codec.errors import ContextLengthExceeded, InvalidRequest
from deepinfer_engine.codec.extras import Extras, apply_extras
from deepinfer_engine.codec.grammars import form_constraint, with_form
from deepinfer_engine.codec.protocol import NextTurn, Part, WireEvent
from deepinfer_engine.codec.structured import Fields, read_form
from deepinfer_engine.core.pictures import Picture
from deepinfer_engine.core.sampling_params import MAX_LOGPROBS
from deepinfer_engine.core.types import (
    FinishReason,
    SamplingParams,
    TokenLogprob,
    TokensEvent,
    TrafficClass,
)
from deepinfer_engine.errors import EngineLost

MAX_CHOICES = 128
_DEFAULT_MAX_TOKENS = 16
_MAX_SEED = (1 << 63) - 1
_FIM = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")  # noqa: RUF001


def _default(value: Any) -> BeforeValidator:
    return BeforeValidator(lambda given: value if given is None else given)


Ids = list[Annotated[int, Field(ge=0)]]
# The end of a text is compared with all of a stop sequence, so its length is bounded.
Stop = Annotated[str, Field(max_length=1000)]


class StreamOptions(BaseModel):
    """What a stream carries beside its text."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


class Body(BaseModel):
    """The request body; null counts as absent. Fields of `Extras` are read by `apply_extras`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    prompt: str | Ids | list[str] | list[Ids]
    suffix: str | None = None
    max_tokens: Annotated[int, Field(ge=0), _default(_DEFAULT_MAX_TOKENS)] = _DEFAULT_MAX_TOKENS
    temperature: Annotated[float, Field(ge=0, le=2), _default(1.0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), _default(1.0)] = 1.0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), _default(1)] = 1
    best_of: int | None = None
    stream: Annotated[bool, _default(False)] = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Annotated[bool, _default(False)] = False
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), _default(0.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), _default(0.0)] = 0.0
    seed: Annotated[int, Field(ge=-(1 << 63), le=_MAX_SEED)] | None = None
    user: str | None = None
    return_token_ids: Annotated[bool, _default(False)] = False
    skip_special_tokens: Annotated[bool, _default(True)] = True


class TextTokenizer(Protocol):
    """What completions need of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer and what is known of its ids.

    silent: ids that never spell anything; special: ids that are markup, not text.
    fim: ids of begin, hole and end of fill-in-the-middle prompts, None where there are none.
    """

    tokenizer: TextTokenizer
    size: int
    begin: tuple[int, ...]
    """What a prompt of text begins with."""
    ends: frozenset[int]
    silent: frozenset[int]
    special: frozenset[int]
    fim: tuple[int, int, int] | None

    @staticmethod
    def fim_ids(added: dict[str, int]) -> tuple[int, int, int] | None:
        """The three ids, if the vocabulary has them all."""
        ids = tuple(added[name] for name in _FIM if name in added)
        return (ids[0], ids[1], ids[2]) if len(ids) == 3 else None


def read_body(body: bytes) -> Body:
    """Parse and check. Raises InvalidRequest naming the field."""
    try:
        value = json.loads(body)
    except RecursionError as exc:
        raise InvalidRequest("the body is JSON that is nested too deeply") from exc
    except ValueError as exc:
        raise InvalidRequest(f"the body is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(value).__name__}")
    try:
        read = Body.model_validate(value)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        param = str(errors[0]["loc"][0]) if errors[0]["loc"] else ""
        if param == "prompt":
            raise InvalidRequest(
                "prompt: wanted a string, a list of strings, a list of token ids or a list of "
                "such lists, none empty",
                param="prompt",
            ) from exc
        given = json.dumps(errors[0].get("input"), default=str)[:60]
        raise InvalidRequest(f"{param}: {errors[0]['msg']}, got {given}", param=param) from exc
    if read.best_of not in (None, 1, read.n):
        raise InvalidRequest("best_of must equal n: answers are not ranked here", param="best_of")
    return read


def unknown_fields(body: Body) -> tuple[str, ...]:
    """Names in the body that mean nothing here."""
    known = {*Extras.model_fields, *Fields.model_fields}
    return tuple(sorted(set(body.model_extra or ()) - known))


def prompts(body: Body, vocabulary: Vocabulary) -> list[tuple[str | None, list[int]]]:
    """Each prompt as given, if it was text, and as ids. Raises InvalidRequest."""
    given = body.prompt
    texts: list[str | list[int]]
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        texts = [given]  # type: ignore[list-item]  # one prompt, of text or of ids
    else:
        texts = list(given)  # type: ignore[arg-type]
    if not texts or any(not item for item in texts if isinstance(item, list)):
        raise InvalidRequest("prompt: there is nothing to go on from", param="prompt")
    rows: list[tuple[str | None, list[int]]] = []
    for item in texts:
        if isinstance(item, list):
            for token in item:
                if token >= vocabulary.size:
                    raise InvalidRequest(
                        f"prompt: token ids are 0..{vocabulary.size - 1}, got {token}",
                        param="prompt",
                    )
            rows.append((None, item))
        else:
            rows.append((item, [*vocabulary.begin, *_filled(item, body.suffix, vocabulary)]))
    if body.suffix and any(text is None for text, _ in rows):
        raise InvalidRequest("suffix: goes with prompts of text, not of token ids", param="suffix")
    return rows


def _filled(text: str, suffix: str | None, vocabulary: Vocabulary) -> list[int]:
    try:
        text.encode()
        (suffix or "").encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest("prompt: lone surrogate in a string", param="prompt") from exc
    encode = vocabulary.tokenizer.encode
    if not suffix:
        return encode(text)
    if vocabulary.fim is None:
        raise InvalidRequest(
            "suffix: this model has no fill-in-the-middle tokens; leave it out", param="suffix"
        )
    begin, hole, end = vocabulary.fim
    return [begin, *encode(text), hole, *encode(suffix), end]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """See `protocol.PreparedRequest`."""

    body: Body
    vocabulary: Vocabulary
    parts: tuple[Part, ...]
    texts: tuple[str | None, ...]
    created: int
    warnings: tuple[str, ...] = ()
    unenforced: bool = False
    pictures: tuple[Picture, ...] = ()
    constraint_param: str = ""

    @property
    def model(self) -> str:
        return self.body.model

    @property
    def stream(self) -> bool:
        return self.body.stream

    @property
    def traffic_class(self) -> TrafficClass:
        return "chat"

    @property
    def user_id(self) -> str | None:
        return self.body.user or None

    def encoders(self, response_id: str) -> list[CompletionEncoder]:
        answer = _Answer(self, response_id)
        return [CompletionEncoder(answer, index) for index in range(len(self.parts))]


def prepare(
    body: bytes, vocabulary: Vocabulary, max_model_len: int, *, created: int, new_seed: int
) -> CompletionRequest:
    """A checked request. Raises InvalidRequest, ContextLengthExceeded."""
    read = read_body(body)
    rows = prompts(read, vocabulary)
    if len(rows) * read.n > MAX_CHOICES:
        raise InvalidRequest(
            f"n: {len(rows)} prompts x {read.n} answers are more than {MAX_CHOICES}", param="n"
        )
    of_prompt = read.logprobs if read.echo else None
    if of_prompt is not None and read.suffix:
        raise InvalidRequest(
            "suffix: what is filled in has no log probabilities of a prompt; leave out one of "
            "suffix, echo and logprobs",
            param="suffix",
        )
    form = read_form(body)
    constraint = None if form is None else form_constraint(form)
    seed = new_seed if read.seed is None else read.seed & _MAX_SEED
    parts: list[Part] = []
    texts: list[str | None] = []
    for text, ids in rows:
        if len(ids) + max(1, read.max_tokens) > max_model_len:
            raise ContextLengthExceeded(
                f"this model's context is {max_model_len} tokens, and the request wants "
                f"{len(ids)} of prompt and {read.max_tokens} of answer; shorten one of them",
                param="prompt",
            )
        for i in range(read.n):
            sampling = SamplingParams(
                temperature=read.temperature,
                top_p=read.top_p,
                seed=(seed + i) & _MAX_SEED,
                max_tokens=max(1, read.max_tokens),
                presence_penalty=read.presence_penalty,
                frequency_penalty=read.frequency_penalty,
                logprobs=read.logprobs,
            )
            sampling = apply_extras(sampling, body, vocabulary.size)
            if form is not None and constraint is not None:
                sampling = with_form(sampling, form, constraint)
            parts.append(Part(tuple(ids), sampling, of_prompt))
            texts.append(text)
    return CompletionRequest(
        body=read,
        vocabulary=vocabulary,
        parts=tuple(parts),
        texts=tuple(texts),
        created=created,
        warnings=unknown_fields(read),
        constraint_param="" if form is None else form.param,
    )


class _Answer:
    """What the choices of one request share: the frame around them, and their usage."""

    def __init__(self, request: CompletionRequest, response_id: str) -> None:
        self.request = request
        self.head = {
            "id": response_id,
            "object": "text_completion",
            "created": request.created,
            "model": request.model,
        }
        self.choices: dict[int, dict[str, Any]] = {}
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.details: Mapping[str, int | str] = {}

    def event(self, choice: dict[str, Any]) -> WireEvent:
        return _event({**self.head, "choices": [choice]})

    def close(self, index: int, choice: dict[str, Any]) -> list[WireEvent]:
        """Keep a finished choice; the end of the stream behind the last one."""
        self.choices[index] = choice
        if len(self.choices) < len(self.request.parts):
            return []
        out: list[WireEvent] = []
        options = self.request.body.stream_options
        if options is not None and options.include_usage:
            out.append(_event({**self.head, "choices": [], "usage": self.usage()}))
        return [*out, WireEvent(None, "[DONE]")]

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, **self.details},
        }

    def body(self) -> str:
        choices = [self.choices[index] for index in sorted(self.choices)]
        return _dumps({**self.head, "choices": choices, "usage": self.usage()})


class CompletionEncoder:
    """One choice: see `protocol.AnswerEncoder`."""

    waits = False
    keeps = False

    def __init__(self, answer: _Answer, index: int) -> None:
        body = answer.request.body
        self._answer = answer
        self._index = index
        self._wants = body.max_tokens
        stops = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
        self._text = _StopText([stop for stop in stops if stop])
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._shown: list[str] = []
        self._offset = 0
        self._ids: list[int] = []
        self._logprobs: dict[str, list[Any]] | None = None
        if body.logprobs is not None:
            self._logprobs = {n: [] for n in _LOGPROB_FIELDS}
        self._pending: deque[Entry] = deque()
        self._reason: str | None = None
        self.finished = False

    def start(
        self, prompt_tokens: int, cached_tokens: int, details: Mapping[str, int | str]
    ) -> list[WireEvent]:
        answer, body = self._answer, self._answer.request.body
        if self._index % body.n == 0:  # a prompt is read once for all its answers
            answer.prompt_tokens += prompt_tokens
            answer.cached_tokens += cached_tokens
            answer.details = details if len(answer.request.parts) == body.n else {}
        if not body.echo or body.logprobs is not None:
            return []
        return self._show(self._prompt(), ())

    def _prompt(self) -> str:
        answer = self._answer
        text = answer.request.texts[self._index]
        if text is None:
            ids = answer.request.parts[self._index].token_ids
            text = b"".join(map(answer.request.vocabulary.tokenizer.token_bytes, ids)).decode(
                errors="replace"
            )
        return text

    def _echo(self, said: Sequence[TokenLogprob]) -> list[WireEvent]:
        """The prompt with what was said of its tokens: nothing of the first."""
        request = self._answer.request
        ids, vocabulary = request.parts[self._index].token_ids, request.vocabulary
        begins = 0 if request.texts[self._index] is None else len(vocabulary.begin)
        spell = codecs.getincrementaldecoder("utf-8")(errors="replace")
        entries: list[Entry] = []
        start = 0
        for at, token in enumerate(ids):
            entries.append((start, self._spelled(token), said[at - 1] if at else None))
            if at >= begins:  # what a text begins with is not part of it
                start += len(spell.decode(vocabulary.tokenizer.token_bytes(token)))
        text = self._prompt()
        out = self._show(text, entries)
        self._offset = len(text)
        return out

    def tokens(self, event: TokensEvent) -> list[WireEvent]:
        if self._answer.request.parts[self._index].prompt_logprobs is not None and not event.index:
            return [*self._echo(event.prompt_logprobs), *self._answered(event)]
        return self._answered(event)

    def _answered(self, event: TokensEvent) -> list[WireEvent]:
        if self.finished or not self._wants:
            return []
        vocabulary, body = self._answer.request.vocabulary, self._answer.request.body
        for i, token in enumerate(event.token_ids):
            self._ids.append(token)
            self._answer.completion_tokens += 1
            hidden = token in vocabulary.silent or token >= vocabulary.size
            hidden = hidden or (body.skip_special_tokens and token in vocabulary.special)
            raw = b"" if hidden else vocabulary.tokenizer.token_bytes(token)
            text = self._decoder.decode(raw)
            if event.logprobs and not hidden:
                self._pending.append((self._text.taken, self._spelled(token), event.logprobs[i]))
            if self._text.push(text):
                self._reason = "stop"
                break
        out = self._emit()
        if self._reason:
            out += self._close()
        return out

    def finish(self, reason: FinishReason) -> list[WireEvent]:
        if self.finished:
            return []
        if reason not in ("stop", "length", "insufficient_system_resource"):
            raise EngineLost(f"the engine ended this answer with {reason!r}")
        if self._wants:
            stopped = self._text.push(self._decoder.decode(b"", final=True))
            self._text.release()
            self._reason = "stop" if stopped else reason
        else:
            self._reason = "length"
        return [*self._emit(), *self._close()]

    async def run_tools(self, generated: int) -> list[WireEvent]:
        raise RuntimeError("completions run no tools")

    def next_turn(self) -> NextTurn:
        raise RuntimeError("completions have one turn")

    def keep(self) -> None:
        """Completions are not kept."""

    def body(self) -> str:
        return self._answer.body()

    def _emit(self) -> list[WireEvent]:
        text = self._text.take()
        entries: list[Entry] = []
        while self._pending and (self._pending[0][0] < self._text.shown or self._reason):
            entry = self._pending.popleft()
            if entry[0] < self._text.shown or not self._text.stopped:
                entries.append(entry)
        return self._show(text, entries) if text or entries else []

    def _show(self, text: str, entries: Sequence[Entry]) -> list[WireEvent]:
        self._shown.append(text)
        logprobs = None
        if self._logprobs is not None:
            logprobs = {name: [] for name in _LOGPROB_FIELDS}
            for start, spelled, entry in entries:
                logprobs["tokens"].append(spelled)
                logprobs["token_logprobs"].append(None if entry is None else entry.logprob)
                top = None if entry is None else {self._spelled(t): v for t, v in entry.top}
                logprobs["top_logprobs"].append(top)
                logprobs["text_offset"].append(self._offset + start)
            for name, values in logprobs.items():
                self._logprobs[name] += values
        if not self._answer.request.stream:
            return []
        return [self._answer.event(self._choice(text, logprobs, None))]

    def _spelled(self, token: int) -> str:
        if token >= self._answer.request.vocabulary.size:
            return ""
        raw = self._answer.request.vocabulary.tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _choice(self, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _close(self) -> list[WireEvent]:
        self.finished = True
        whole = self._choice("".join(self._shown), self._logprobs, self._reason)
        last = self._choice("", None, self._reason)
        if self._answer.request.body.return_token_ids:
            ids = {
                "token_ids": self._ids,
                "prompt_token_ids": list(self._answer.request.parts[self._index].token_ids),
            }
            whole, last = {**whole, **ids}, {**last, **ids}
        ends = self._answer.close(self._index, whole)
        if not self._answer.request.stream:
            return []
        return [self._answer.event(last), *ends]


Entry = tuple[int, str, TokenLogprob | None]
"""Where a token's text starts, the text, and what was said of it; nothing of a prompt's first."""

_LOGPROB_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(slots=True)
class _StopText:
    """Text up to the first stop sequence; what may be the beginning of one is held back."""

    stops: Sequence[str]
    taken: int = 0
    """Characters pushed."""
    shown: int = 0
    """Characters that were taken out, a part of those pushed."""
    stopped: bool = False
    _held: str = ""
    _ready: list[str] = field(default_factory=list[str])

    def push(self, text: str) -> bool:
        """Add text; True when a stop sequence is complete, behind which nothing is shown."""
        self.taken += len(text)
        self._held += text
        if not self.stops:
            self.release()
            return False
        found = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._ready.append(self._held[: min(found)])
            self._held = ""
            self.stopped = True
            return True
        keep = max(map(self._beginning, self.stops))
        cut = len(self._held) - keep
        self._ready.append(self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _beginning(self, stop: str) -> int:
        """Length of the longest end of the held text that `stop` begins with."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0

    def release(self) -> None:
        """No stop sequence will come any more."""
        self._ready.append(self._held)
        self._held = ""

    def take(self) -> str:
        text = "".join(self._ready)
        self._ready.clear()
        self.shown += len(text)
        return text


def _event(value: dict[str, Any]) -> WireEvent:
    return WireEvent(None, _dumps(value))


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
