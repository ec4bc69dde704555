"""Tools: their definitions and the calls a model makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from deepinfer_recipe.base.json_text import compact_json, prompt_json
from deepinfer_recipe.base.values import Value, require_str


class ToolCall(Value):
    """A historical tool call and its arguments."""

    __slots__ = ("_arguments", "_id", "_name")

    def __init__(self, id: str, name: str, arguments: str) -> None:
        if not type(id) is type(name) is type(arguments) is str:
            require_str("id", id)
            require_str("name", name)
            require_str("arguments", arguments)
        self._id = id
        self._name = name
        self._arguments = arguments

    @property
    def id(self) -> str:
        """The id that the answering tool message repeats."""
        return self._id

    @property
    def name(self) -> str:
        """Name of the function called."""
        return self._name

    @property
    def arguments(self) -> str:
        """Caller-supplied arguments, expected to encode a JSON object; not validated."""
        return self._arguments

    def __repr__(self) -> str:
        return f"ToolCall({self._id!r}, {self._name!r}, {self._arguments!r})"


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """What the one string argument `input` of a custom tool must match.

    syntax: `lark` or `regex`, the language of `definition`.
    """

    syntax: Literal["lark", "regex"]
    definition: str


class ToolDefinition(Value):
    """A client tool definition.

    `strict` is passed through. Direct construction does not normalize `parameters`, unlike
    conversion, which normalizes the parameters of a tool with `strict: true`.
    `input_grammar` (custom tools) constrains the output; the prompt does not show it.
    """

    __slots__ = (
        "_constraint",
        "_defer_loading",
        "_description",
        "_input_grammar",
        "_line",
        "_name",
        "_names",
        "_parameters",
        "_strict",
    )

    def __init__(
        self,
        name: str,
        description: str | None = None,
        parameters: Any = None,
        strict: bool | None = None,
        defer_loading: bool = False,
        *,
        input_grammar: InputGrammar | None = None,
    ) -> None:
        require_str("name", name)
        self._name = name
        self._input_grammar = input_grammar
        self._description = description
        self._parameters = parameters
        self._strict = strict
        self._defer_loading = defer_loading
        # Made on first use: tools are shared by the requests of a session.
        self._line: str | None = None
        self._constraint: str | None = None
        self._names: frozenset[str] | None = None

    def _key(self) -> tuple[Any, ...]:
        return (
            self._name,
            self._description,
            self._parameters,
            self._strict,
            self._defer_loading,
            self._input_grammar,
        )

    @property
    def prompt_line(self) -> str:
        """The JSON line that announces the tool in a prompt."""
        if self._line is None:
            self._line = prompt_json(
                {
                    "name": self._name,
                    "description": self._description or "",
                    "parameters": self._parameters,
                }
            )
        return self._line

    @property
    def constraint_json(self) -> str:
        """The tool as a constraint on the output lists it: compact JSON of a Chat tool.

        A custom tool's grammar stands beside the function, as
        `"input_grammar": {"syntax", "definition"}`.
        """
        if self._constraint is None:
            entry: dict[str, Any] = {
                "type": "function",
                "function": {
                    "name": self._name,
                    "description": self._description,
                    "parameters": self._parameters,
                    "strict": self._strict,
                },
            }
            if self._defer_loading:
                entry["defer_loading"] = True
            if self._input_grammar is not None:
                entry["input_grammar"] = {
                    "syntax": self._input_grammar.syntax,
                    "definition": self._input_grammar.definition,
                }
            self._constraint = compact_json(entry)
        return self._constraint

    @property
    def name(self) -> str:
        """Name of the function."""
        return self._name

    @property
    def description(self) -> str | None:
        """What the tool is for; None renders as an empty string."""
        return self._description

    @property
    def parameters(self) -> Any:
        """Input JSON Schema of the tool."""
        return self._parameters

    @property
    def parameter_names(self) -> frozenset[str] | None:
        """Names of the parameters that the schema declares, itself or in its alternatives.

        None where it says nothing of the kind, or says it elsewhere (`$ref`).
        """
        if self._names is None:
            self._names = frozenset(_declared_names(self._parameters))
        return self._names or None

    @property
    def strict(self) -> bool | None:
        """The `strict` setting, passed through without normalizing `parameters`."""
        return self._strict

    @property
    def defer_loading(self) -> bool:
        """Whether the tool is announced later, by a system message, not at the top."""
        return self._defer_loading

    @property
    def input_grammar(self) -> InputGrammar | None:
        """What the `input` of a custom tool must match."""
        return self._input_grammar

    def __repr__(self) -> str:
        return f"ToolDefinition({self._name!r}, {self._description!r}, {self._parameters!r})"


def _declared_names(schema: Any, depth: int = 0) -> set[str]:
    if not isinstance(schema, dict) or depth > 3 or "$ref" in schema:
        return set()
    properties = schema.get("properties")
    names = set(properties) if isinstance(properties, dict) else set[str]()
    for key in ("anyOf", "oneOf", "allOf"):
        members = schema.get(key)
        for member in members if isinstance(members, list) else ():
            names |= _declared_names(member, depth + 1)
    return names
