"""Output constraints as grammars: a request's promise about its answer, as text.

`request_grammar` says what an answer must look like, all of it: the thinking, where the request
thinks; then JSON, text by an expression, or text with well-formed calls of the declared tools.
The result is a structural tag, a JSON text that needs no library to make and that can travel to
the process that enforces it (`deepinfer_recipe.grammar.compile`, or any engine on xgrammar).

    thinking on    free text · </think> · answer         thinking off, or already over    answer
    json           a value of the schema                  regex        text it matches as a whole
    tools, auto    free text, and at its end a block of calls or none
    required       calls: the prompt has opened their block, or they follow the thinking

Free text holds neither the end of thinking nor the mark of tool calls.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from deepinfer_recipe.base.errors import GrammarError, GrammarTooComplex
from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.conversation.inference import OutputConstraint
from deepinfer_recipe.conversation.parsing_options import ParsingOptions, ThinkingInitialStage
from deepinfer_recipe.conversation.special_tokens import SpecialToken
from deepinfer_recipe.grammar.budget import MAX_GRAMMAR_BYTES
from deepinfer_recipe.grammar.calls import CallsGrammar
from deepinfer_recipe.grammar.formats import (
    Format,
    any_text,
    const,
    optional,
    regex,
    sequence,
    token,
)
from deepinfer_recipe.grammar.json_calls import JsonCallsGrammar
from deepinfer_recipe.grammar.schema import answer_json
from deepinfer_recipe.prompts.template_model import TargetModel, TemplateModel
from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest

_THINK_START = "<think>"


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """What an answer must look like.

    text: a structural tag, as compact JSON.
    prefix: the part of the answer that the prompt ends with; the grammar begins before it.
    """

    text: str
    prefix: str = ""


def request_grammar(request: ConversationRequest) -> OutputGrammar | None:
    """The grammar of a request's answer; None if the request constrains nothing.

    Raises `GrammarError` for a constraint that cannot be enforced, `GrammarTooComplex` beyond
    `MAX_GRAMMAR_BYTES`.
    """
    constraint = request.inference_options.output_constraint
    if constraint is None:
        return None
    text = constraint_grammar(
        constraint, parsing_options=request.parsing_options, version=request.model_version
    )
    last = request.conversation.messages[-1] if request.conversation.messages else None
    prefix = last.content if last is not None and last.prefix else ""
    return OutputGrammar(text, prefix)


def constraint_grammar(
    constraint: OutputConstraint, *, parsing_options: ParsingOptions, version: TargetModel
) -> str:
    """The structural tag of a constraint for answers that `parsing_options` will parse.

    Raises like `request_grammar`.
    """
    tokens = parsing_options.special_tokens
    think_end, dsml = tokens.token(SpecialToken.ThinkingEnd), tokens.token(SpecialToken.Dsml)
    own = version if isinstance(version, TemplateModel) else None
    is_calls = constraint.kind in ("tool_call", "tool_call_required")
    try:
        answer = _answer(constraint, parsing_options, version)
    except RecursionError:
        raise GrammarTooComplex("the schema nests too deeply; make it flatter") from None
    except GrammarError as error:
        error.param = error.param or "response_format"
        raise
    if _thinks(parsing_options) and not parsing_options.starts_in_tool_calls:
        marks = (think_end, dsml) if is_calls and own is None else (think_end,)
        ends = own is None or think_end in own.special_tokens
        end = token(think_end) if ends else const(think_end)
        thinking = [any_text(*marks), end]
        if own is not None and not parsing_options.starts_in_thinking:
            begins = _THINK_START in own.special_tokens
            begin = token(_THINK_START) if begins else const(_THINK_START)
            answer = sequence(optional(sequence(begin, *thinking)), _blank_lines(), answer)
        else:
            answer = sequence(*thinking, *([] if own is None else [_blank_lines()]), answer)
    text = compact_json({"type": "structural_tag", "format": answer})
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarTooComplex(
            f"the grammar of the answer takes {size} bytes, at most {MAX_GRAMMAR_BYTES} are "
            "allowed; send fewer tools or smaller schemas",
            param="tools" if is_calls else "response_format",
        )
    return text


def _thinks(options: ParsingOptions) -> bool:
    stage = options.thinking_initial_stage
    return stage is not None and stage is not ThinkingInitialStage.ContentContinuation


def _blank_lines() -> Format:
    """What models put between thinking and answer."""
    return optional(const("\n\n"))


def _answer(constraint: OutputConstraint, options: ParsingOptions, version: TargetModel) -> Format:
    tokens = options.special_tokens
    think_end, dsml = tokens.token(SpecialToken.ThinkingEnd), tokens.token(SpecialToken.Dsml)
    if constraint.kind == "regex":
        return regex(constraint.schema)
    if constraint.kind == "json":
        schema = json.loads(constraint.schema) if constraint.schema else {"type": "object"}
        return answer_json(schema, excluded=(think_end, dsml))
    if isinstance(version, TemplateModel):
        own = JsonCallsGrammar(constraint.schema, version.dialect, version.special_tokens)
        return own.demanded() if constraint.kind == "tool_call_required" else own.possible()
    calls = CallsGrammar(constraint.schema, version.prompt_format, dsml)
    if options.starts_in_tool_calls:
        return calls.inside()
    block = calls.block()
    text = any_text(think_end, dsml)
    if constraint.kind != "tool_call_required":
        return sequence(text, optional(block))
    # Thoughts stand before the call; text beside them might go on until no token is left for it.
    return block if _thinks(options) else sequence(text, block)
