"""`Codec` on `deepinfer_recipe`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_engine.adapters.recipe import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    Conversation,
    ConversationRequest,
    ConversionError,
    ConversionOptions,
    DeepseekV41Encoding,
    InferenceChunk,
    InferenceFinishReason,
    MessagesRequest,
    MessagesResponse,
    ModelVersion,
    PromptUsage,
    ReasoningSealer,
    RequestParseError,
    ResponsesRequest,
    ResponsesResponse,
    ResponseStore,
    ResponseTurn,
    SpecialToken,
    StoreError,
    StreamProcessor,
    Tokenizer,
    WebSearchBehavior,
)
from deepinfer_engine.codec.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    PreviousResponseNotFound,
    Protocol,
)
from deepinfer_engine.codec.extras import apply_extras
from deepinfer_engine.codec.grammars import constrained, constraint_param
from deepinfer_engine.codec.pictures import PictureIntake, PicturePolicy, param_of
from deepinfer_engine.codec.protocol import NextTurn, WireEvent
from deepinfer_engine.codec.responses import RecipeResponses
from deepinfer_engine.core.pictures import Picture, place
from deepinfer_engine.core.types import FinishReason, SamplingParams, TokensEvent, TrafficClass
from deepinfer_engine.core.web_search import ToolRun, WebSearch
from deepinfer_engine.errors import (
    CheckpointError,
    EngineLost,
    EngineUnavailable,
    UnknownModel,
)

_MAX_USER_BYTES = 512
_REQUESTS: dict[str, Any] = {
    "chat": ChatCompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
_RESPONSES: dict[str, Any] = {
    "chat": ChatCompletionResponse,
    "responses": ResponsesResponse,
    "messages": MessagesResponse,
}
_NO_RESOURCE = "insufficient_system_resource"
FINISH: dict[str, InferenceFinishReason] = {
    "stop": InferenceFinishReason.Stop,
    "length": InferenceFinishReason.Length,
    # The codec has no such reason: it closes the answer as for a limit, and `_renamed` names it.
    _NO_RESOURCE: InferenceFinishReason.Length,
}


class RecipeCodec:
    """The three protocols for one tokenizer and the names one model is served under."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model_names: Sequence[str],
        *,
        default_thinking: bool = True,
        pictures: PictureIntake | None = None,
        wall: Callable[[], float] = time.time,
        new_seed: Callable[[], int] = lambda: secrets.randbits(63),
        responses: ResponseStore | None = None,
        sealer: ReasoningSealer | None = None,
        web: WebSearch | None = None,
    ) -> None:
        """`new_seed` seeds requests that bring no seed; `wall` is the time stamp of answers.

        responses: keeps Responses answers; sealer: seals their reasoning, for each owner apart.
        pictures: None where the model takes none. web: runs the web searches that requests ask the
        server for; None leaves them out of Responses and refuses them in Messages.
        """
        self._web = web
        self._responses = responses
        self._sealer = sealer
        self._tokenizer = tokenizer
        self._encoding = DeepseekV41Encoding().with_tokenizer(tokenizer)
        self._pictures = pictures
        image = SpecialToken.Image.value
        if pictures is not None and tokenizer.special_id(image) != pictures.rules.image_token_id:
            raise CheckpointError(
                f"the tokenizer has {image} as token {tokenizer.special_id(image)}, config.json "
                f"says image_token_id {pictures.rules.image_token_id}: they do not belong together"
            )
        self._names = tuple(model_names)
        self.vocab_size = tokenizer.backend.get_vocab_size(with_added_tokens=True)
        self._eos = tokenizer.special_id(SpecialToken.Eos.value)
        # Spelling these inside an answer (with ignore_eos) would help nobody.
        self.silent = frozenset((self._eos, tokenizer.special_id(SpecialToken.Bos.value)))
        self._wall = wall
        self._new_seed = new_seed
        self._options = ConversionOptions(
            default_thinking_mode=default_thinking
        ).with_model_versions_by_name(dict.fromkeys(self._names, ModelVersion.DeepseekV41Flash))
        if web is not None:
            self._options = (
                self._options.with_responses_web_search(WebSearchBehavior.Run)
                .with_messages_web_search(WebSearchBehavior.Run)
                .with_search_result_text(web.result_text)
            )

    @classmethod
    def from_directory(
        cls,
        model_dir: Path,
        model_names: Sequence[str],
        *,
        default_thinking: bool = True,
        pictures: PicturePolicy | None = None,
        responses: ResponseStore | None = None,
        sealer: ReasoningSealer | None = None,
        web: WebSearch | None = None,
    ) -> RecipeCodec:
        """With the `tokenizer.json` of a checkpoint directory, and what its `config.json` says of
        pictures, unless `pictures` is None. Raises CheckpointError.
        """
        path = model_dir / "tokenizer.json"
        intake = None if pictures is None else PictureIntake.of_directory(model_dir, pictures)
        try:
            tokenizer = Tokenizer.from_file(str(path))
            return cls(
                tokenizer,
                model_names,
                default_thinking=default_thinking,
                pictures=intake,
                responses=responses,
                sealer=sealer,
                web=web,
            )
        except OSError as exc:
            raise CheckpointError(f"cannot read the tokenizer {path}: {exc.strerror}") from exc
        except (ValueError, RuntimeError) as exc:
            raise CheckpointError(f"the tokenizer {path} is unusable: {exc}") from exc

    @property
    def blocks(self) -> bool:
        return self._pictures is not None

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._names

    @property
    def kept_responses(self) -> RecipeResponses | None:
        return None if self._responses is None else RecipeResponses(self._responses)

    def prepare(
        self, protocol: Protocol, body: bytes, max_model_len: int, *, owner: str = ""
    ) -> RecipeRequest:
        model, request, turn = self._convert(protocol, body, owner)
        options = request.inference_options
        if options.n != 1:
            raise InvalidRequest("n must be 1: this server gives one answer a request", param="n")
        token_ids, pictures = self._encode(request)
        try:
            max_tokens = request.resolve_max_tokens(len(token_ids), max_model_len)
        except ConversionError as exc:
            raise ContextLengthExceeded(exc.message, param=exc.param) from exc
        if len(token_ids) >= max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(token_ids)} tokens and this model's context "
                f"{max_model_len}: no room for an answer; shorten the conversation",
                param="messages",
            )
        sampling = SamplingParams(
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=1.0 if options.top_p is None else options.top_p,
            seed=self._new_seed() if options.seed is None else options.seed,
            max_tokens=max_tokens,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
        )
        sampling = constrained(apply_extras(sampling, body, self.vocab_size), request, protocol)
        return RecipeRequest(
            codec=self,
            protocol=protocol,
            request=request,
            model=model,
            token_ids=token_ids,
            pictures=pictures,
            sampling=sampling,
            ends=frozenset((self._eos, *sampling.stop_token_ids)),
            created=int(self._wall()),
            user_id=_checked_user(request.user),
            turn=turn,
            max_model_len=max_model_len,
            tools=self._tools(request, body),
        )

    def _tools(self, request: ConversationRequest, body: bytes) -> ToolRun | None:
        """What runs the server's tools of this request, if it declares any."""
        if self._web is None or not request.server_tools:
            return None
        [tool] = request.server_tools.values()  # web search is the only one there is
        include: Any = json.loads(body).get("include") or ()
        return self._web.start(tool.dialect, tool.declaration, [str(i) for i in include])

    def count_tokens(self, protocol: Protocol, body: bytes) -> int:
        _, request, _ = self._convert(protocol, body, "")
        return len(self._encode(request)[0])

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"token ids are 0..{self.vocab_size - 1}, got {token}", param="tokens"
                )
        return self._tokenizer.backend.decode(list(token_ids), skip_special_tokens=False)

    @property
    def tokenizer(self) -> Tokenizer:
        """What answers are decoded with."""
        return self._tokenizer

    def _convert(
        self, protocol: Protocol, body: bytes, owner: str
    ) -> tuple[str, ConversationRequest, ResponseTurn | None]:
        """Model name, converted request, and what keeps the answer (Responses with a store)."""
        turn: ResponseTurn | None = None
        options = self._options
        try:
            if protocol == "responses":
                parsed, turn = self._parse_responses(body, owner)
                if self._sealer is not None:
                    options = options.with_reasoning_sealer(self._sealer.for_audience(owner))
            else:
                parsed = _REQUESTS[protocol](body, profile="extended")
            model: str = parsed.model
            if model not in self._names:
                raise UnknownModel(model, self._names)
            request: ConversationRequest = parsed.convert(options)
        except RequestParseError as exc:
            raise InvalidRequest(str(exc), param=exc.param) from exc
        except ConversionError as exc:
            kind = PreviousResponseNotFound if exc.status_code == 404 else InvalidRequest
            raise kind(exc.message, param=exc.param) from exc
        except StoreError as exc:
            raise EngineUnavailable(f"kept responses cannot be read: {exc}") from exc
        return model, request, turn

    def _parse_responses(
        self, body: bytes, owner: str
    ) -> tuple[ResponsesRequest, ResponseTurn | None]:
        parsed = ResponsesRequest(body, profile="extended")
        value: dict[str, Any] = json.loads(body)
        for name in ("conversation", "background"):
            if value.get(name):
                raise InvalidRequest(f"{name} is not supported by this server", param=name)
        if self._responses is None:
            return parsed, None
        turn = ResponseTurn(value, self._responses, owner)
        again = ResponsesRequest(body, profile="extended", history=turn.history, stores=turn.stores)
        return again, turn

    def encode_again(
        self, conversation: Conversation, pictures: Sequence[Picture]
    ) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        """Tokens of a conversation that went on, with the pictures it had."""
        rendered = self._encoding.render_conversation(conversation)
        token_ids = self._tokenizer.encode_prompt(rendered.prompt, rendered.special_ranges)
        if self._pictures is None or not pictures:
            return tuple(token_ids), ()
        images = [(p.width, p.height, p.pixels) for p in pictures]
        return place(token_ids, images, self._pictures.rules)

    def _encode(self, request: ConversationRequest) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        """Tokens of the prompt, and its pictures, each in place of its placeholder."""
        rendered = self._encoding.render_conversation(request.conversation)
        token_ids = self._tokenizer.encode_prompt(rendered.prompt, rendered.special_ranges)
        sources = rendered.image_sources
        if not sources:
            return tuple(token_ids), ()
        if self._pictures is None:
            raise InvalidRequest(
                "this server's model takes no pictures", param=param_of(sources[0])
            )
        return place(token_ids, self._pictures.of_request(sources), self._pictures.rules)


@dataclass(frozen=True, slots=True)
class RecipeRequest:
    """See `protocol.PreparedRequest`. `ends`: ids that are no text at the end."""

    codec: RecipeCodec
    protocol: Protocol
    request: ConversationRequest
    model: str
    token_ids: tuple[int, ...]
    pictures: tuple[Picture, ...]
    sampling: SamplingParams
    ends: frozenset[int]
    created: int
    user_id: str | None
    turn: ResponseTurn | None = None
    max_model_len: int = 0
    tools: ToolRun | None = None

    @property
    def stream(self) -> bool:
        return self.request.stream

    @property
    def traffic_class(self) -> TrafficClass:
        conversation = self.request.conversation
        tools = bool(conversation.tools) or any(m.role == "tool" for m in conversation.messages)
        return "agent" if tools else "chat"

    @property
    def constraint_param(self) -> str:
        return constraint_param(self.request, self.protocol)

    def encoder(self, response_id: str) -> RecipeEncoder:
        if self.tools is None:
            return RecipeEncoder(self, response_id)
        from deepinfer_engine.codec.tools import RecipeToolEncoder

        return RecipeToolEncoder(self, response_id, self.tools)


class RecipeEncoder:
    """One answer; see `codec.protocol.AnswerEncoder`."""

    def __init__(self, prepared: RecipeRequest, response_id: str) -> None:
        self._prepared = prepared
        self._id = response_id
        self._response_type = _RESPONSES[prepared.protocol]
        self._response: Any = None
        more = {} if prepared.protocol == "messages" else {"created": prepared.created}
        generator = _REQUESTS[prepared.protocol].chunk_generator(
            prepared.request, response_id, prepared.model, **more
        )
        self._out_of_memory = False
        self._open(generator)

    def _open(self, generator: Any) -> None:
        options = self._prepared.request.parsing_options
        self._processor = StreamProcessor(generator, options, self._prepared.codec.tokenizer)

    @property
    def finished(self) -> bool:
        return self._processor.finished

    def start(self, prompt_tokens: int, cached_tokens: int) -> list[WireEvent]:
        prepared = self._prepared
        if self._response is None and (not prepared.stream or self.keeps):
            self._response = self._response_type(
                self._id, prepared.model, prepared.created, prompt_tokens, cached_tokens
            )
        usage = PromptUsage(prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens)
        return self._push(InferenceChunk.ready(prompt_usage=usage))

    def tokens(self, event: TokensEvent) -> list[WireEvent]:
        ids, logprobs = event.token_ids, _pairs(event, self._prepared.codec.vocab_size)
        out: list[WireEvent] = []
        for start, stop, spells in self._runs(ids):
            if self.finished:
                return out
            if spells:
                chunk = InferenceChunk.tokens(
                    ids[start:stop], None if logprobs is None else logprobs[start:stop]
                )
            else:
                chunk = InferenceChunk.text("", stop - start)
            out += self._push(chunk)
        return out

    def _runs(self, ids: tuple[int, ...]) -> Iterator[tuple[int, int, bool]]:
        """Slices of one step to push together, and whether they spell anything or only count."""
        silent, size = self._prepared.codec.silent, self._prepared.codec.vocab_size
        spells = [token < size and token not in silent for token in ids]
        spells[-1] = spells[-1] and ids[-1] not in self._prepared.ends
        start = 0
        for stop in range(1, len(ids) + 1):
            if stop == len(ids) or spells[stop] != spells[start]:
                yield start, stop, spells[start]
                start = stop

    @property
    def waits(self) -> bool:
        return False

    async def run_tools(self, generated: int) -> list[WireEvent]:
        raise RuntimeError("this request declares no tools of the server")

    def next_turn(self) -> NextTurn:
        raise RuntimeError("this request declares no tools of the server")

    def finish(self, reason: FinishReason) -> list[WireEvent]:
        out: list[WireEvent] = []
        if not self.finished:
            self._check(reason)
            out += self._push(InferenceChunk.finish(FINISH[reason]))
        out += self._wire(self._processor.finish())
        if reason == _NO_RESOURCE:
            self._out_of_memory = True
            out = [WireEvent(event.name, _renamed(event.data)) for event in out]
        return out + self._done()

    def _check(self, reason: FinishReason) -> None:
        """Raise EngineError for a reason that has no name in this protocol."""
        if reason == _NO_RESOURCE and self._prepared.protocol != "chat":
            raise EngineUnavailable("the engine ran out of cache memory and gave this answer up")
        if reason not in FINISH:
            raise EngineLost(f"the engine ended this answer with {reason!r}")

    def _done(self) -> list[WireEvent]:
        """The end marker of protocols that have one."""
        done = self._response_type.sse_done_data()
        return [WireEvent(None, done)] if self._prepared.stream and done is not None else []

    @property
    def keeps(self) -> bool:
        turn = self._prepared.turn
        return turn is not None and turn.stores

    def keep(self) -> None:
        turn = self._prepared.turn
        if turn is None:
            return
        try:
            is_kept = turn.keep(self._response.to_dict())
        except StoreError as exc:
            raise EngineUnavailable(str(exc)) from exc
        if not is_kept:
            raise EngineUnavailable("the answer is larger than one that is kept may be")

    def body(self) -> str:
        text: str = self._response.to_json()
        return _renamed(text) if self._out_of_memory else text

    def _push(self, chunk: InferenceChunk) -> list[WireEvent]:
        return self._wire(self._processor.push(chunk))

    def _wire(self, chunks: Sequence[Any]) -> list[WireEvent]:
        if self._response is not None:
            for chunk in chunks:
                self._response.accumulate(chunk)
        if not self._prepared.stream:
            return []
        name = self._response_type.sse_event_name
        return [WireEvent(name(chunk), chunk.to_json()) for chunk in chunks]


def _pairs(
    event: TokensEvent, vocab_size: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]] | None:
    """Log probabilities for the codec, without alternatives that have no spelling: a model may have
    more rows of logits than its tokenizer has tokens.
    """
    if not event.logprobs:
        return None
    return [
        (entry.logprob, tuple(pair for pair in entry.top if pair[0] < vocab_size))
        for entry in event.logprobs
    ]


def _renamed(text: str) -> str:
    """Chat Completions JSON with the finish reason that DeepSeek's API documents for this case."""
    value = json.loads(text)
    for choice in value.get("choices", ()):
        if choice.get("finish_reason") is not None:
            choice["finish_reason"] = _NO_RESOURCE
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _checked_user(user: str | None) -> str | None:
    if user is not None and len(user.encode(errors="replace")) > _MAX_USER_BYTES:
        raise InvalidRequest(
            f"user_id has at most {_MAX_USER_BYTES} bytes of UTF-8", param="user_id"
        )
    return user or None
