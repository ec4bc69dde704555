"""`Codec` on `deepinfer_recipe`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from deepinfer_engine.adapters.recipe import (
    Answer,
    Conversation,
    ConversionError,
    ConversionOptions,
    Exchange,
    InferenceChunk,
    ModelVersion,
    ReasoningSealer,
    RenderedPrompt,
    RequestParseError,
    ResponseStore,
    ServerToolPolicy,
    SpecialToken,
    StoreError,
    TemplateModel,
    Tokenizer,
    UnknownModelError,
    WebSearchBehavior,
)
from deepinfer_engine.codec import completions
from deepinfer_engine.codec.errors import (
    ChatProtocol,
    ContextLengthExceeded,
    InvalidRequest,
    PreviousResponseNotFound,
    Protocol,
)
from deepinfer_engine.codec.extras import Extras, apply_extras
from deepinfer_engine.codec.grammars import (
    constrained,
    constraint_param,
    held_to,
    is_forced_behind_thinking,
    may_compile,
)
from deepinfer_engine.codec.pictures import PictureIntake, PicturePolicy, param_of
from deepinfer_engine.codec.protocol import (
    NextTurn,
    Part,
    PreparedRequest,
    Tokenising,
    WireEvent,
)
from deepinfer_engine.codec.responses import RecipeResponses
from deepinfer_engine.codec.structured import Fields, check_alone, read_form
from deepinfer_engine.core.pictures import Picture, place
from deepinfer_engine.core.sampling_params import SamplingDefaults
from deepinfer_engine.core.types import FinishReason, SamplingParams, TokensEvent, TrafficClass
from deepinfer_engine.core.web_search import ToolOutcome, ToolRun, WebSearch
from deepinfer_engine.errors import (
    CheckpointError,
    EngineLost,
    EngineUnavailable,
    UnknownModel,
)


@dataclass(frozen=True, slots=True)
class TemplateTarget:
    """A model whose prompts its own chat template writes; None where it is not made to chat."""

    model: TemplateModel | None
    eos_token_ids: tuple[int, ...]

    def begin(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """What its tokenizer puts before a text."""
        ids = tokenizer.backend.encode("", add_special_tokens=True).ids
        return tuple(i for i in ids if i not in self.eos_token_ids)


_MAX_USER_BYTES = 512
_NO_RESOURCE = "insufficient_system_resource"
FINISH: dict[str, Literal["stop", "length"]] = {
    "stop": "stop",
    "length": "length",
    # The codec has no such reason: it closes the answer as for a limit, and `_renamed` names it.
    _NO_RESOURCE: "length",
}
_ESCAPE_BYTES = 6
"""JSON may write a byte of text as `\\u00ff`."""
_OTHER_FIELDS_BYTES = 1 << 20
"""Of a body, for everything that is not in the prompt."""
_ANSWER_TOKENS = 256
"""Kept free for the answer when results of the server's tools are sized."""


_HONOURED = frozenset((*Extras.model_fields, *Fields.model_fields))
"""Fields beyond a protocol that are not warned of."""


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
        enforces: bool | None = None,
        tokenizer_path: Path | None = None,
        target: TemplateTarget | None = None,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        """`new_seed` seeds requests that bring no seed; `wall` is the time stamp of answers.

        responses: keeps Responses answers; sealer: seals their reasoning, for each owner apart.
        pictures: None where the model takes none. web: runs the web searches that requests ask the
        server for; None leaves them out of Responses and refuses them in Messages. enforces:
        whether the workers compile grammars; by default, whether xgrammar is installed here.
        target: the chat template of another family; None is V4.1's own encoding. defaults: of
        sampling, where a request does not say.
        """
        self._defaults = defaults or SamplingDefaults()
        self._web = web
        self.tokenizer_path = tokenizer_path
        self._longest_token = longest_token_bytes(tokenizer)
        self._responses = responses
        self._sealer = sealer
        self._tokenizer = tokenizer
        self._pictures = pictures
        image = SpecialToken.Image.value
        if pictures is not None and tokenizer.special_id(image) != pictures.rules.image_token_id:
            raise CheckpointError(
                f"the tokenizer has {image} as token {tokenizer.special_id(image)}, config.json "
                f"says image_token_id {pictures.rules.image_token_id}: they do not belong together"
            )
        self._names = tuple(model_names)
        self.vocab_size = tokenizer.backend.get_vocab_size(with_added_tokens=True)
        if target is None:
            begin = (tokenizer.special_id(SpecialToken.Bos.value),)
            self._ends = frozenset((tokenizer.special_id(SpecialToken.Eos.value),))
        else:
            begin, self._ends = target.begin(tokenizer), frozenset(target.eos_token_ids)
        # Spelling these inside an answer (with ignore_eos) would help nobody.
        self.silent = self._ends | frozenset(begin)
        added = tokenizer.backend.get_added_tokens_decoder()
        self._vocabulary = completions.Vocabulary(
            tokenizer=tokenizer,
            size=self.vocab_size,
            begin=begin,
            ends=self._ends,
            silent=self.silent,
            special=frozenset(i for i, token in added.items() if token.special),
            fim=completions.Vocabulary.fim_ids({t.content: i for i, t in added.items()}),
        )
        self._wall = wall
        self._new_seed = new_seed
        self._chats = target is None or target.model is not None
        model = ModelVersion.DeepseekV41Flash if target is None else target.model
        self._options = ConversionOptions(default_thinking_mode=default_thinking)
        if model is not None:
            self._options = self._options.with_model_versions_by_name(
                dict.fromkeys(self._names, model)
            )
        self._enforces = find_spec("xgrammar") is not None if enforces is None else enforces
        self._options = self._options.with_thinking_before_forced_calls(self._enforces)
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
        enforces: bool | None = None,
        target: TemplateTarget | None = None,
        defaults: SamplingDefaults | None = None,
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
                enforces=enforces,
                tokenizer_path=path,
                target=target,
                defaults=defaults,
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

    def body_bytes(self, max_model_len: int) -> int | None:
        if self._pictures is not None or self._longest_token is None:
            return None
        return _ESCAPE_BYTES * max_model_len * self._longest_token + _OTHER_FIELDS_BYTES

    def prepare(
        self,
        protocol: Protocol,
        body: bytes,
        max_model_len: int,
        *,
        owner: str = "",
        tokenising: Tokenising | None = None,
    ) -> PreparedRequest:
        if protocol == "completions":
            return self._completion(body, max_model_len, tokenising)
        exchange = self._exchange(protocol, body, owner)
        if is_forced_behind_thinking(exchange.request) and not may_compile(
            enforces=self._enforces, request=exchange.request
        ):
            exchange = self._exchange(protocol, body, owner, thinks_before_forced=False)
        request = exchange.request
        form = None if protocol == "messages" else read_form(body)
        if form is not None:
            check_alone(request, form)
        options = request.inference_options
        if options.n > completions.MAX_CHOICES:
            raise InvalidRequest(f"n: at most {completions.MAX_CHOICES}", param="n")
        self.check_bytes(exchange.rendered.prompt, max_model_len, "messages")
        token_ids, pictures = self._encode(exchange.rendered, tokenising)
        overflow = _overflow(protocol, len(token_ids), options.max_tokens, max_model_len)
        if overflow is not None:
            raise overflow
        max_tokens = request.resolve_max_tokens(len(token_ids), max_model_len)
        sampling = SamplingParams(
            temperature=_first(options.temperature, self._defaults.temperature),
            top_p=_first(options.top_p, self._defaults.top_p),
            top_k=self._defaults.top_k,
            repetition_penalty=self._defaults.repetition_penalty,
            seed=self._new_seed() if options.seed is None else options.seed,
            max_tokens=max_tokens,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
        )
        sampling = apply_extras(sampling, body, self.vocab_size)
        if form is None:
            sampling, unenforced = constrained(sampling, request, protocol, enforces=self._enforces)
        else:
            sampling, unenforced = held_to(sampling, request, form), False
        return RecipeRequest(
            codec=self,
            exchange=exchange,
            token_ids=token_ids,
            pictures=pictures,
            sampling=sampling,
            ends=self._ends | frozenset(sampling.stop_token_ids),
            created=int(self._wall()),
            user_id=_checked_user(request.user),
            max_model_len=max_model_len,
            tools=self._tools(exchange),
            answers=options.n,
            warnings=tuple(n for n in exchange.ignored_fields if n not in _HONOURED),
            form_param="" if form is None else form.param,
            unenforced=unenforced,
        )

    def _completion(
        self, body: bytes, max_model_len: int, tokenising: Tokenising | None
    ) -> completions.CompletionRequest:
        bounded = _BoundedTokenizer(self, max_model_len, tokenising)
        request = completions.prepare(
            body,
            replace(self._vocabulary, tokenizer=bounded),
            max_model_len,
            created=int(self._wall()),
            new_seed=self._new_seed(),
        )
        if request.model not in self._names:
            raise UnknownModel(request.model, self._names)
        _checked_user(request.user_id)
        return request

    def _tools(self, exchange: RecipeExchange) -> ToolRun | None:
        """What runs the server's tools of this request, if it declares any."""
        if self._web is None or not exchange.request.server_tools:
            return None
        [tool] = exchange.request.server_tools.values()  # web search is the only one there is
        include: Any = exchange.fields.get("include") or ()
        return self._web.start(tool.dialect, tool.declaration, [str(i) for i in include])

    def count_tokens(
        self, protocol: ChatProtocol, body: bytes, *, tokenising: Tokenising | None = None
    ) -> int:
        return len(self._encode(self._exchange(protocol, body, "").rendered, tokenising)[0])

    def tokenize(self, text: str, *, tokenising: Tokenising | None = None) -> list[int]:
        if tokenising is not None:
            return tokenising.encode(text, None)
        return self._tokenizer.encode(text)

    def check_bytes(self, prompt: str, max_model_len: int, param: str) -> None:
        """Refuse a prompt that no tokens of this context can spell, before it costs anything."""
        if self._longest_token is None:
            return
        most = max_model_len * self._longest_token
        if len(prompt) > most or (
            4 * len(prompt) > most and len(prompt.encode(errors="replace")) > most
        ):
            raise ContextLengthExceeded(
                f"the prompt has at least {len(prompt)} bytes, and {max_model_len} tokens, this "
                f"model's context, spell at most {most}; shorten the conversation",
                param=param,
            )

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

    def _exchange(
        self,
        protocol: ChatProtocol,
        body: bytes,
        owner: str,
        *,
        thinks_before_forced: bool = True,
    ) -> RecipeExchange:
        """The request, parsed and converted; its answer is not begun yet."""
        if not self._chats:
            raise InvalidRequest("this model has no chat template: use /v1/completions")
        options = self._options
        if not thinks_before_forced:
            options = options.with_thinking_before_forced_calls(False)
        if protocol == "responses" and self._sealer is not None:
            options = options.with_reasoning_sealer(self._sealer.for_audience(owner))
        try:
            exchange = RecipeExchange(
                protocol,
                body,
                options=options,
                store=self._responses,
                owner=owner,
                tokenizer=self._tokenizer,
                frame=WireEvent,
            )
        except UnknownModelError as exc:
            raise UnknownModel(exc.model, self._names) from exc
        except RequestParseError as exc:
            raise InvalidRequest(str(exc), param=exc.param) from exc
        except ConversionError as exc:
            kind = PreviousResponseNotFound if exc.status_code == 404 else InvalidRequest
            error = kind(exc.message, param=exc.param)
            if exc.code == "thread_unsupported_request":
                error.details = {"error_code": exc.code}
            raise error from exc
        except StoreError as exc:
            raise EngineUnavailable(f"kept responses cannot be read: {exc}") from exc
        return exchange

    def encode_again(
        self, rendered: RenderedPrompt, pictures: Sequence[Picture]
    ) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        """Tokens of a conversation that went on, with the pictures it had."""
        token_ids = self._tokenizer.encode_prompt(rendered.prompt, rendered.special_ranges)
        if self._pictures is None or not pictures:
            return tuple(token_ids), ()
        images = [(p.width, p.height, p.pixels) for p in pictures]
        return place(token_ids, images, self._pictures.rules)

    def _encode(
        self, rendered: RenderedPrompt, tokenising: Tokenising | None
    ) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        """Tokens of the prompt, and its pictures, each in place of its placeholder."""
        encode = self._tokenizer.encode_prompt if tokenising is None else tokenising.encode
        token_ids = encode(rendered.prompt, rendered.special_ranges)
        sources = rendered.image_sources
        if not sources:
            return tuple(token_ids), ()
        if self._pictures is None:
            raise InvalidRequest(
                "this server's model takes no pictures", param=param_of(sources[0])
            )
        return place(token_ids, self._pictures.of_request(sources), self._pictures.rules)


def _first(wanted: float | None, default: float) -> float:
    return default if wanted is None else wanted


@dataclass(frozen=True, slots=True)
class _BoundedTokenizer:
    """What completions tokenise with: a text that cannot fit is refused by its bytes."""

    codec: RecipeCodec
    max_model_len: int
    tokenising: Tokenising | None

    def encode(self, text: str) -> list[int]:
        self.codec.check_bytes(text, self.max_model_len, "prompt")
        return self.codec.tokenize(text, tokenising=self.tokenising)

    def token_bytes(self, token_id: int) -> bytes:
        return self.codec.tokenizer.token_bytes(token_id)


def longest_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Bytes of text that one token stands for at most; None where a normaliser changes the text
    before it is tokenised."""
    if tokenizer.backend.normalizer is not None:
        return None
    spelled = tokenizer.backend.get_vocab(with_added_tokens=False)
    added = (token.content for token in tokenizer.backend.get_added_tokens_decoder().values())
    # A byte-level vocabulary writes a byte as a character.
    return max([*map(len, spelled), *(len(text.encode()) for text in added)])


class RecipeExchange(Exchange[WireEvent]):
    """An exchange whose prompt may be rendered again, when the server has run tools for it."""

    encoder: RecipeEncoder | None = None
    """What turns the answer's tokens into events, once the answer has begun."""

    def render(self, conversation: Conversation) -> bool:
        super().render(conversation)
        return self.encoder is None or self.encoder.go_on_from(self.rendered)


@dataclass(frozen=True, slots=True)
class RecipeRequest:
    """See `protocol.PreparedRequest`. `ends`: ids that are no text at the end.

    Its answer is encoded once.
    """

    codec: RecipeCodec
    exchange: RecipeExchange
    token_ids: tuple[int, ...]
    pictures: tuple[Picture, ...]
    sampling: SamplingParams
    ends: frozenset[int]
    created: int
    user_id: str | None
    max_model_len: int = 0
    unenforced: bool = False
    tools: ToolRun | None = None
    answers: int = 1
    warnings: tuple[str, ...] = ()
    form_param: str = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The same prompt for each answer; answers after the first draw from seeds of their own."""
        seed = self.sampling.seed or 0
        further = (replace(self.sampling, seed=(seed + i) % 2**63) for i in range(1, self.answers))
        return tuple(Part(self.token_ids, sampling) for sampling in (self.sampling, *further))

    @property
    def model(self) -> str:
        return self.exchange.model

    @property
    def protocol(self) -> ChatProtocol:
        return self.exchange.protocol

    @property
    def stream(self) -> bool:
        return self.exchange.stream

    @property
    def traffic_class(self) -> TrafficClass:
        conversation = self.exchange.request.conversation
        tools = bool(conversation.tools) or any(m.role == "tool" for m in conversation.messages)
        return "agent" if tools else "chat"

    @property
    def constraint_param(self) -> str:
        return self.form_param or constraint_param(self.exchange.request, self.protocol)

    def encoders(self, response_id: str) -> list[RecipeEncoder]:
        self.exchange.begin(
            response_id,
            created=self.created,
            sends=self.stream,
            accumulates=not self.stream,
            keeps=False,
        )
        return [RecipeEncoder(self, answer) for answer in self.exchange.answers]


class RecipeEncoder:
    """One answer, of several turns where the server runs tools: `protocol.AnswerEncoder`."""

    def __init__(self, prepared: RecipeRequest, answer: Answer[WireEvent]) -> None:
        self._prepared = prepared
        self._exchange = exchange = prepared.exchange
        self._out_of_memory = False
        self._prompt_ids = prepared.token_ids
        self._pictures: tuple[Picture, ...] = prepared.pictures
        self._generated = 0
        exchange.encoder = self
        self._answer = answer

    @property
    def finished(self) -> bool:
        return self._answer.finished

    @property
    def waits(self) -> bool:
        return bool(self._answer.pending_calls)

    def start(
        self, prompt_tokens: int, cached_tokens: int, details: Mapping[str, int | str]
    ) -> list[WireEvent]:
        return self._answer.ready(
            prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, details=details
        )

    def tokens(self, event: TokensEvent) -> list[WireEvent]:
        ids, logprobs = event.token_ids, _pairs(event, self._prepared.codec.vocab_size)
        out: list[WireEvent] = []
        for start, stop, spells in self._runs(ids):
            if self.finished:
                return out
            if spells:
                pairs = None if logprobs is None else logprobs[start:stop]
                out += self._answer.tokens(ids[start:stop], pairs)
            else:
                out += self._answer.push(InferenceChunk.text("", stop - start))
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

    def finish(self, reason: FinishReason) -> list[WireEvent]:
        if self.finished or self.waits:
            return []
        if reason == _NO_RESOURCE and self._prepared.protocol != "chat":
            raise EngineUnavailable("the engine ran out of cache memory and gave this answer up")
        if reason not in FINISH:
            raise EngineLost(f"the engine ended this answer with {reason!r}")
        out = self._answer.finish(FINISH[reason])
        if reason == _NO_RESOURCE:
            self._out_of_memory = True
            out = [WireEvent(event.name, _renamed(event.data)) for event in out]
        return out

    async def run_tools(self, generated: int) -> list[WireEvent]:
        self._generated = generated
        return await self._answer.run_server_tools(self._run)

    async def _run(self, name: str, input: dict[str, Any], policy: ServerToolPolicy) -> ToolOutcome:
        tools = self._prepared.tools
        if tools is None:
            raise RuntimeError("this request declares no tools of the server")
        room = self._room() - min(self._left(), _ANSWER_TOKENS)
        return await tools.run(name, input, policy.tool_use_id, max(1, room // 2))

    def go_on_from(self, rendered: RenderedPrompt) -> bool:
        """Take a new prompt; False where it leaves no room for an answer."""
        self._prompt_ids, self._pictures = self._prepared.codec.encode_again(
            rendered, self._prepared.pictures
        )
        return self._room() > 0 and self._left() > 0

    def next_turn(self) -> NextTurn:
        sampling = self._prepared.sampling
        forced = self._exchange.request.inference_options.output_constraint
        if forced is not None and forced.kind == "tool_call_required":
            # The call that the client demanded is made; the answer to it is free.
            sampling = replace(sampling, constraint=None)
        sampling = replace(sampling, max_tokens=min(self._left(), self._room()))
        return NextTurn(self._prompt_ids, self._pictures, sampling)

    def _room(self) -> int:
        return self._prepared.max_model_len - len(self._prompt_ids)

    def _left(self) -> int:
        return self._prepared.sampling.max_tokens - self._generated

    @property
    def keeps(self) -> bool:
        return self._exchange.stores

    def keep(self) -> None:
        try:
            is_kept = self._exchange.keep()
        except StoreError as exc:
            raise EngineUnavailable(str(exc)) from exc
        if self.keeps and not is_kept:
            raise EngineUnavailable("the answer is larger than one that is kept may be")

    def body(self) -> str:
        text = self._exchange.response_json()
        return _renamed(text) if self._out_of_memory else text


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
    if text == "[DONE]":
        return text
    value = json.loads(text)
    for choice in value.get("choices", ()):
        if choice.get("finish_reason") is not None:
            choice["finish_reason"] = _NO_RESOURCE
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _overflow(
    protocol: Protocol, prompt: int, wanted: int | None, limit: int
) -> ContextLengthExceeded | None:
    """The refusal of a request that does not fit, worded as the protocol's clients parse it: they
    shorten the conversation, or lower `max_tokens`, by the numbers they find there.
    """
    if prompt < limit and prompt + (wanted or 0) <= limit:
        return None
    if protocol == "messages":
        if prompt >= limit:
            # one token of answer is the least that a prompt must leave room for
            text = f"prompt is too long: {prompt} tokens > {limit - 1} maximum"
            return ContextLengthExceeded(text)
        text = f"input length and `max_tokens` exceed context limit: {prompt} + {wanted} > {limit}"
        return ContextLengthExceeded(f"{text}, decrease input length or `max_tokens` and try again")
    # An input that leaves no room at all is too long even if no answer length was asked for.
    answer = max(1, wanted or 1)
    place = "input" if protocol == "responses" else "messages"
    text = (
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt + answer} tokens ({prompt} in the {place}, {answer} in the completion). "
        f"Please reduce the length of the {place} or completion."
    )
    return ContextLengthExceeded(text, param=place)


def _checked_user(user: str | None) -> str | None:
    if user is not None and len(user.encode(errors="replace")) > _MAX_USER_BYTES:
        raise InvalidRequest(
            f"user_id has at most {_MAX_USER_BYTES} bytes of UTF-8", param="user_id"
        )
    return user or None
