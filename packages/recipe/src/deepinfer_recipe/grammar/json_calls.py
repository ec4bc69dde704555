"""Tool calls that models write as JSON, as structural tags: the same bytes a template shows."""

from __future__ import annotations

from typing import Any

from deepinfer_recipe.base.errors import GrammarError
from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.conversation.parsing_options import Dialect
from deepinfer_recipe.grammar.budget import Budget
from deepinfer_recipe.grammar.calls import read_tools
from deepinfer_recipe.grammar.formats import (
    Format,
    any_number,
    any_text,
    const,
    either,
    json_schema,
    one_or_more,
    optional,
    sequence,
    token,
)
from deepinfer_recipe.grammar.rewrite import SchemaRewriter
from deepinfer_recipe.grammar.schema import WHITESPACE, check_schema


class JsonCallsGrammar:
    """The calls of one dialect for the tools of one request.

    specials: spellings of the tokenizer's added vocabulary; what stands there is demanded as that
    token. Raises `GrammarError`.
    """

    def __init__(self, tools_json: str, dialect: Dialect, specials: tuple[str, ...]) -> None:
        self._dialect = dialect
        self._specials = specials
        self._budget = Budget()
        calls = [self._call(tool) for tool in read_tools(tools_json)]
        self._one = either(calls)

    def _mark(self, spelling: str) -> Format:
        return token(spelling) if spelling in self._specials else const(spelling)

    def _call(self, tool: dict[str, Any]) -> Format:
        name = tool["name"]
        key = "parameters" if self._dialect == "llama3" else "arguments"
        schema = tool.get("parameters") or {"type": "object"}
        try:
            check_schema(schema)
            made = SchemaRewriter(schema, self._budget).enforceable(schema)
        except GrammarError as error:
            raise type(error)(f"tool {name!r}: {error}", param="tools") from None
        if isinstance(made, dict):
            made.setdefault("type", "object")
        self._budget.pay_bytes(len(compact_json(made)))
        head = f'{{"name": {compact_json(name)}, "{key}": '
        value = json_schema(made, excluded=(), max_whitespace=WHITESPACE)
        return sequence(const(head), value, const("}"))

    def demanded(self) -> Format:
        """One call at least."""
        if self._dialect == "mistral":
            more = any_number(sequence(const(", "), self._one))
            return sequence(self._mark("[TOOL_CALLS]"), const("["), self._one, more, const("]"))
        if self._dialect == "llama3":
            return self._one
        opened, closed = self._mark("<tool_call>"), self._mark("</tool_call>")
        one = sequence(opened, const("\n"), self._one, const("\n"), closed)
        return one_or_more(sequence(one, optional(const("\n"))))

    def possible(self) -> Format:
        """Free text, and calls at its end or none."""
        if self._dialect == "llama3":
            return either([self.demanded(), any_text()])
        opening = "[TOOL_CALLS]" if self._dialect == "mistral" else "<tool_call>"
        return sequence(any_text(opening), optional(self.demanded()))
