"""Constraints on `deepinfer_recipe`: what a request promises, and the service that compiles it."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Literal

from deepinfer_engine.adapters.recipe import (
    PROTOCOLS,
    CompiledGrammar,
    ConversationRequest,
    GrammarBusy,
    GrammarError,
    GrammarService,
    GrammarTooComplex,
    GrammarUnavailable,
    GrammarVocabulary,
    ModelVersion,
    OutputConstraint,
    ParsingOptions,
    Tokenizer,
    constraint_grammar,
    request_grammar,
)
from deepinfer_engine.codec.errors import ChatProtocol, InvalidRequest
from deepinfer_engine.codec.structured import Form
from deepinfer_engine.core.constraint import CompiledGrammar as EngineGrammar
from deepinfer_engine.core.constraint import Grammar, Matcher
from deepinfer_engine.core.types import Constraint, SamplingParams
from deepinfer_engine.errors import (
    ConstraintError,
    ConstraintsUnavailable,
    EngineUnavailable,
    SchemaTooComplex,
)

_MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>",
    "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
)  # fmt: skip
"""Added tokens that answers of models with a chat template are built with."""


def free_constraint(kind: Literal["json", "regex"], schema: str) -> Constraint:
    """The constraint of a whole output, without a conversation around it.

    Raises ConstraintError, SchemaTooComplex.
    """
    try:
        text = constraint_grammar(
            OutputConstraint(kind, schema),
            parsing_options=ParsingOptions(parse_tool_calls=False),
            version=ModelVersion.DeepseekV41Flash,
        )
    except GrammarError as exc:
        raise constraint_error(exc) from exc
    return Constraint(text)


def form_constraint(form: Form) -> Constraint:
    """The constraint of a whole output of this form. Raises like `free_constraint`."""
    constraint = form.constraint()
    kind = "json" if constraint.kind == "json" else "regex"
    try:
        return form.fill(free_constraint(kind, constraint.schema))
    except ConstraintError as error:
        error.param = form.param
        raise


def held_to(sampling: SamplingParams, request: ConversationRequest, form: Form) -> SamplingParams:
    """With an answer of this form, behind thinking that is free. Raises ConstraintError,
    SchemaTooComplex, InvalidRequest."""
    _check_free(sampling, form.param)
    try:
        text = constraint_grammar(
            form.constraint(),
            parsing_options=request.parsing_options,
            version=request.model_version,
        )
    except GrammarError as exc:
        error = constraint_error(exc)
        error.param = form.param
        raise error from exc
    last = request.conversation.messages[-1] if request.conversation.messages else None
    prefix = last.content if last is not None and last.prefix else ""
    return replace(sampling, constraint=form.fill(Constraint(text, prefix)))


def with_form(sampling: SamplingParams, form: Form, constraint: Constraint) -> SamplingParams:
    """With a whole output of this form. Raises InvalidRequest."""
    _check_free(sampling, form.param)
    return replace(sampling, constraint=constraint)


def _check_free(sampling: SamplingParams, form: str) -> None:
    """Where a form ends an answer nothing may follow."""
    if sampling.ignore_eos or sampling.min_tokens:
        name = "ignore_eos" if sampling.ignore_eos else "min_tokens"
        raise InvalidRequest(f"{name} cannot be combined with {form}", param=name)


def constraint_param(request: ConversationRequest, protocol: ChatProtocol) -> str:
    """The field that a request's constraint comes from."""
    constraint = request.inference_options.output_constraint
    of_tools = constraint is not None and constraint.kind in ("tool_call", "tool_call_required")
    return "tools" if of_tools else PROTOCOLS[protocol].format_field


UNASKED_GRAMMAR_BYTES = 32 * 1024
"""Longest grammar that is compiled for calls to which nobody asked that they be held."""
FORCED_GRAMMAR_BYTES = 256 * 1024
"""Longest grammar for a forced call; beyond it thinking is off for that answer, and the call that
the prompt opens is left to the model."""


def may_compile(*, enforces: bool, request: ConversationRequest) -> bool:
    """Whether a forced call of a request that thinks may be held by a grammar."""
    if not enforces:
        return False
    try:
        grammar = request_grammar(request)
    except GrammarError:
        return False
    return grammar is None or len(grammar.text) <= FORCED_GRAMMAR_BYTES


def is_forced_behind_thinking(request: ConversationRequest) -> bool:
    """Whether only a grammar makes the model call the tool that the request forces."""
    return _is_forced(request) and not request.parsing_options.starts_in_tool_calls


def _is_forced(request: ConversationRequest) -> bool:
    constraint = request.inference_options.output_constraint
    return constraint is not None and constraint.kind == "tool_call_required"


def constrained(
    sampling: SamplingParams,
    request: ConversationRequest,
    protocol: ChatProtocol,
    *,
    enforces: bool,
) -> tuple[SamplingParams, bool]:
    """With the constraint of the request; and whether tools are left to the model's good will.

    A strict tool, a forced one behind thinking and a format of the answer are promises: they are
    kept or refused. Other calls are held to their schemas where that costs little and can be
    done; elsewhere the answer is free text that is parsed as usual.
    """
    tools = request.conversation.tools
    # A prompt that cannot open the call leaves a forced one to the grammar, where there is one.
    is_held = enforces and is_forced_behind_thinking(request)
    needed = not tools or any(tool.strict for tool in tools) or is_held
    try:
        grammar = request_grammar(request)
    except GrammarError as exc:
        if not needed:
            return sampling, True
        error = constraint_error(exc)
        error.param = constraint_param(request, protocol)
        raise error from exc
    if grammar is None:
        return sampling, False
    most_bytes = FORCED_GRAMMAR_BYTES if _is_forced(request) else UNASKED_GRAMMAR_BYTES
    if not needed and len(grammar.text) > most_bytes:
        return sampling, True
    if sampling.ignore_eos or sampling.min_tokens:
        if needed:
            name = "ignore_eos" if sampling.ignore_eos else "min_tokens"
            raise InvalidRequest(
                f"{name} cannot be combined with a format of the answer", param=name
            )
        return sampling, True
    # A model that thinks until its tokens are gone would never come to the call.
    think = sampling.max_tokens // 2 if is_held else None
    constraint = Constraint(grammar.text, grammar.prefix, needed, think)
    return replace(sampling, constraint=constraint), False


def constraint_error(error: GrammarError) -> ConstraintError:
    """The engine's error for one of the codec's."""
    kind = SchemaTooComplex if isinstance(error, GrammarTooComplex) else ConstraintError
    return kind(str(error), param=error.param)


class RecipeGrammars:
    """`grammar.compiler.GrammarCompiler` on the codec's service."""

    def __init__(
        self,
        tokenizer_path: Path,
        vocab_size: int,
        *,
        timeout_s: float = 20.0,
        cache_bytes: int = 256 << 20,
        eos_token_ids: Collection[int] | None = None,
    ) -> None:
        """Nothing is loaded before the first grammar. Raises ConstraintsUnavailable.

        eos_token_ids: of a model with a chat template; None is V4.1's own vocabulary.
        """

        def vocabulary() -> GrammarVocabulary:
            tokenizer = Tokenizer.from_file(str(tokenizer_path))
            if eos_token_ids is None:
                return GrammarVocabulary.of(tokenizer, vocab_size=vocab_size)
            return GrammarVocabulary.of(
                tokenizer, vocab_size=vocab_size, stop_token_ids=eos_token_ids, marks=_MARKS
            )

        try:
            self._service = GrammarService(vocabulary, timeout_s=timeout_s, cache_bytes=cache_bytes)
        except GrammarUnavailable as exc:
            raise ConstraintsUnavailable(str(exc)) from exc

    def submit(self, text: str) -> Future[EngineGrammar]:
        try:
            inner = self._service.submit(text)
        except GrammarBusy as exc:
            raise EngineUnavailable(str(exc)) from exc
        outer: Future[EngineGrammar] = Future()
        inner.add_done_callback(lambda done: _pass_on(done, outer))
        return outer

    def abandon(self, text: str) -> None:
        self._service.abandon(text)

    def counters(self) -> dict[str, float]:
        return self._service.counters()

    def gauges(self) -> dict[str, float]:
        return self._service.gauges()

    def close(self) -> None:
        self._service.close()


def _pass_on(done: Future[CompiledGrammar], outer: Future[EngineGrammar]) -> None:
    error = EngineUnavailable("the grammar compiler is closed") if done.cancelled() else None
    error = error or done.exception()
    if not outer.set_running_or_notify_cancel():
        return
    match error:
        case None:
            outer.set_result(_RecipeGrammar(done.result()))
        case GrammarError():
            outer.set_exception(constraint_error(error))
        case GrammarUnavailable():
            outer.set_exception(ConstraintsUnavailable(str(error)))
        case GrammarBusy():
            outer.set_exception(EngineUnavailable(str(error)))
        case _:
            outer.set_exception(error)


class _RecipeGrammar:
    """`core.constraint.CompiledGrammar` on a compiled one."""

    def __init__(self, compiled: CompiledGrammar, think_tokens: int | None = None) -> None:
        self._compiled = compiled
        self._think_tokens = think_tokens
        self.mask_words = compiled.vocabulary.mask_words

    def matcher(self, prefix: str) -> Matcher:
        try:
            return self._compiled.matcher(prefix, think_tokens=self._think_tokens)
        except GrammarError as exc:
            raise ConstraintError(str(exc), param="messages") from exc

    def thinking(self, tokens: int) -> Grammar:
        return _RecipeGrammar(self._compiled, tokens)
