"""The block of tool calls as a structural tag: what the renderer writes, byte for byte.

Two departures are deliberate. Parameters come in the order in which the schema declares them.
And each DSML mark must be the special token, though ordinary tokens could spell it: the next
turn's prompt has the token there.
"""

from __future__ import annotations

import json
from typing import Any

from deepinfer_recipe.base.errors import GrammarError
from deepinfer_recipe.grammar.budget import Budget
from deepinfer_recipe.grammar.formats import (
    Format,
    any_number,
    const,
    either,
    lark,
    one_or_more,
    optional,
    regex,
    sequence,
    token,
)
from deepinfer_recipe.grammar.schema import ParameterSplitter, ParameterValues, check_schema
from deepinfer_recipe.prompts.formats.prompt_format import PromptFormat

_MAX_LEADING = 16
"""Parameters that may be the first one; each starts its own alternative, and the size of the
grammar grows with their square."""
_FREE_NAME = r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}"


class CallsGrammar:
    """The markup of one prompt format for the tools of one request."""

    def __init__(self, tools_json: str, form: PromptFormat, dsml: str) -> None:
        """tools_json: the tool list of an `OutputConstraint`. Raises `GrammarError`."""
        self._form = form
        self._dsml = dsml
        self._budget = Budget()
        tools = read_tools(tools_json)
        self._invocations = one_or_more(either([self._invocation(tool) for tool in tools]))

    def block(self) -> Format:
        """A whole block, blank line in front included."""
        return sequence(self._tag("\n\n<", f"{self._form.calls_tag}>\n"), self.inside())

    def inside(self) -> Format:
        """What follows where the prompt has opened the block: calls, and the closing tag."""
        return sequence(self._invocations, self._tag("</", f"{self._form.calls_tag}>"))

    def _tag(self, opening: str, rest: str) -> Format:
        return sequence(const(opening), token(self._dsml), const(rest))

    def _invocation(self, tool: dict[str, Any]) -> Format:
        name = tool["name"]
        try:
            body = self._parameters(tool)
        except GrammarError as error:
            raise type(error)(f"tool {name!r}: {error}", param="tools") from None
        invoke = self._form.invoke_tag
        return sequence(
            self._tag("<", f'{invoke} name="{name}">\n'), body, self._tag("</", f"{invoke}>\n")
        )

    def _parameters(self, tool: dict[str, Any]) -> Format:
        parameters = tool.get("parameters") or {}
        check_schema(parameters)
        if not isinstance(parameters, dict):
            raise GrammarError("its parameters are not the schema of an object")
        splitter = ParameterSplitter(parameters, self._dsml, self._budget)
        made = splitter.rewriter.enforceable(splitter.resolve(parameters))
        if not isinstance(made, dict):
            raise GrammarError("its parameters are not the schema of an object")
        members = made.get("anyOf", made.get("oneOf"))
        resolved = [
            splitter.rewriter.enforceable(splitter.resolve(one)) for one in members or [made]
        ]
        # `true` asks nothing of the object, `false` is an alternative that nothing meets
        shapes = [
            shape if isinstance(shape, dict) else {} for shape in resolved if shape is not False
        ]
        if not shapes:
            raise GrammarError("no value meets the schema of its parameters")
        return either([self._shape(shape, splitter, tool.get("grammar")) for shape in shapes])

    def _shape(
        self, shape: dict[str, Any], splitter: ParameterSplitter, grammar: dict[str, str] | None
    ) -> Format:
        """The parameters of an object schema without alternatives."""
        required = shape.get("required") or []
        lines: list[Format] = []
        needs: list[bool] = []
        for name, schema in (shape.get("properties") or {}).items():
            values = splitter.split(schema)
            if grammar is not None:
                values = ParameterValues(raw=[_own_grammar(grammar)])
            if values.raw or values.json:
                lines.append(self._parameter(self._name(name), values))
                needs.append(name in required)
            elif name in required:
                raise GrammarError(f"no value is allowed for the required parameter {name!r}")
        return self._in_order(lines, needs, self._more(shape, splitter))

    def _name(self, name: str) -> Format:
        if '"' in name or "\n" in name or self._dsml in name:
            raise GrammarError(f"the markup of tool calls cannot write the name {name!r}")
        return const(name)

    def _parameter(self, name: Format, values: ParameterValues) -> Format:
        tag = self._form.parameter_tag
        written = [
            sequence(const(f'" string="{flag}">'), either(formats))
            for flag, formats in (("true", values.raw), ("false", values.json))
            if formats
        ]
        return sequence(
            self._tag("<", f'{tag} name="'), name, either(written), self._tag("</", f"{tag}>\n")
        )

    def _more(self, shape: dict[str, Any], splitter: ParameterSplitter) -> Format | None:
        """Parameters of any name, where the schema declares none and says that others may come."""
        more = shape.get("additionalProperties")
        if more is None or more is False or shape.get("properties"):
            # Beside declared ones a free name could repeat one, with a value of another schema.
            return None
        values = splitter.split(more)
        return self._parameter(regex(_FREE_NAME), values) if values.raw or values.json else None

    def _in_order(self, lines: list[Format], needs: list[bool], more: Format | None) -> Format:
        def tail(start: int) -> list[Format]:
            rest = [
                line if needed else optional(line)
                for line, needed in zip(lines[start:], needs[start:], strict=True)
            ]
            return [*rest, any_number(more)] if more is not None else rest

        blank = self._form.empty_arguments_line
        if any(needs) or not blank:
            return sequence(*tail(0)) if tail(0) else const("")
        # Without any parameter there is an empty line, with one there is none.
        if len(lines) > _MAX_LEADING:
            return either([const(blank), sequence(*tail(0))])
        firsts = [sequence(line, *tail(at + 1)) for at, line in enumerate(lines)]
        if more is not None:
            firsts.append(one_or_more(more))
        return either([const(blank), *firsts])


def _own_grammar(grammar: dict[str, str]) -> Format:
    made = {"lark": lark, "regex": regex}.get(grammar["syntax"])
    if made is None:
        raise GrammarError(f"its grammar's syntax is {grammar['syntax']!r}; send lark or regex")
    return made(grammar["definition"])


def read_tools(tools_json: str) -> list[dict[str, Any]]:
    """The functions of a constraint's tool list. Raises `GrammarError`."""
    try:
        entries = json.loads(tools_json)
        tools = [{**one["function"], "grammar": one.get("input_grammar")} for one in entries]
    except (ValueError, TypeError, KeyError) as error:
        raise GrammarError(f"the constraint is no list of function tools: {error!r}") from None
    if not tools:
        raise GrammarError("the constraint lists no tool")
    return tools
