"""JSON Schemas as structural tags.

The markup of tool calls writes a string as raw text and everything else as JSON, so the schema
of a parameter is split into the strings it allows and its other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_recipe.base.errors import GrammarError
from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.grammar.budget import Budget
from deepinfer_recipe.grammar.formats import (
    Format,
    any_text,
    const,
    ebnf,
    either,
    json_schema,
    regex,
    sequence,
)
from deepinfer_recipe.grammar.rewrite import ANNOTATIONS, MAX_DEPTH, SchemaRewriter, target
from deepinfer_recipe.protocols.common.schema_check import schema_problem

_MAX_REFERENCES = 32
_IMPLIED_TYPES = {
    "object": ("properties", "required", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_OTHER_TYPES = ["object", "array", "boolean", "null"]
_LONE_SURROGATES = ("\\ud", "\\uD")
"""Half of a pair is an escape that JSON allows and no UTF-8 text can hold."""
WHITESPACE = 1
"""Blanks in a row: a model that has lost its way loops in longer runs, and pays for each."""
MAX_LEAST = 32
"""Largest `minLength` of a string that stands as text in a call. Each character that is counted
one by one costs 20 ms to compile for a vocabulary of 129,000 tokens; in JSON a bound costs nothing.
"""
MAX_UNROLLED = 20
"""Longest `maxLength` of such a string that is counted one by one; longer ones are a budget."""

NUMBER = 'root ::= "-"? ("0" | [1-9] [0-9]{0,17}) ("." [0-9]{1,17})? ([eE] [+-]? [0-9]{1,2})?'
"""A number that a double holds; JSON's own grammar has no bound on the exponent."""


def answer_json(schema: Any, *, excluded: Sequence[str]) -> Format:
    """An answer that is JSON by `schema`; its strings hold none of `excluded`."""
    check_schema(schema)
    made = SchemaRewriter(schema).enforceable(schema)
    return json_schema(made, excluded=_excluded(made, *excluded), max_whitespace=WHITESPACE)


def check_schema(schema: Any) -> None:
    """Raise `GrammarError` unless this is a JSON Schema."""
    problem = schema_problem(schema)
    if problem is not None:
        raise GrammarError(f"not a JSON Schema: {problem}")


def _excluded(schema: Any, *marks: str) -> tuple[str, ...]:
    # xgrammar would drop the bounds of strings it has to filter.
    return () if _bounds_strings(schema) else (*marks, *_LONE_SURROGATES)


def _bounds_strings(schema: Any) -> bool:
    if isinstance(schema, dict):
        return (
            "minLength" in schema
            or "maxLength" in schema
            or any(map(_bounds_strings, schema.values()))
        )
    return isinstance(schema, list) and any(map(_bounds_strings, schema))


@dataclass(slots=True)
class ParameterValues:
    """The ways a parameter may be written: as raw text (`string="true"`) and as JSON."""

    raw: list[Format] = field(default_factory=list[Format])
    json: list[Format] = field(default_factory=list[Format])

    def add(self, other: ParameterValues) -> None:
        """More ways; those that are there already are not written twice."""
        self.raw += [one for one in other.raw if one not in self.raw]
        self.json += [one for one in other.json if one not in self.json]


class ParameterSplitter:
    """Splits the schemas of one tool's parameters.

    root: the tool's parameters, where references lead.
    mark: the token of the markup. It ends values, so no value may spell it.
    """

    def __init__(self, root: dict[str, Any], mark: str, budget: Budget) -> None:
        self._root = root
        self._mark = mark
        self._budget = budget
        self.rewriter = SchemaRewriter(root, budget)
        self._split: dict[str, ParameterValues] = {}
        """What a bare reference comes to: shared definitions are split once."""
        self._definitions: dict[str, tuple[Any, int]] = {}
        """Rewritten named schemas and the bytes they take."""

    def resolve(self, schema: Any) -> Any:
        """Follow references until there is none. Raises `GrammarError` for an endless chain."""
        for _ in range(_MAX_REFERENCES):
            if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
                return schema
            beside = {key: value for key, value in schema.items() if key != "$ref"}
            schema = self.rewriter.merge(target(self._root, schema["$ref"]), beside)
        raise GrammarError("the schema's references lead in a circle without any value")

    def split(self, schema: Any, depth: int = 0) -> ParameterValues:
        """How values of this schema are written. Both lists are empty if it allows none."""
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema nests deeper than {MAX_DEPTH} levels; make it flatter")
        self._budget.pay_nodes()
        bare = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
        if isinstance(bare, str) and bare in self._split:
            return self._split[bare]
        out = self._alternatives(self.resolve(schema), depth)
        if isinstance(bare, str):
            self._split[bare] = out
        return out

    def _alternatives(self, schema: Any, depth: int) -> ParameterValues:
        out = ParameterValues()
        if schema is False:
            return out
        if not isinstance(schema, dict):
            schema = {}
        schema = self.rewriter.flattened(schema)
        members = schema.get("anyOf", schema.get("oneOf"))
        if "enum" in schema or "const" in schema:
            self._constants(schema, out)
        elif isinstance(members, list):
            self.rewriter.check_keywords(schema)
            for member in members:
                self._budget.pay_nodes(len(out.raw) + len(out.json))
                out.add(self.split(member, depth + 1))
        else:
            for kind in _types(schema):
                self._typed(kind, schema, out)
        return out

    def _constants(self, schema: dict[str, Any], out: ParameterValues) -> None:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "const" in schema:
            values = [value for value in values if value == schema["const"]]
        self._budget.pay_bytes(len(compact_json(values)))
        texts = [value for value in values if isinstance(value, str)]
        for text in texts:
            if self._mark in text:
                raise GrammarError(
                    f"the schema's constant {text!r} spells the markup of tool calls"
                )
        if texts:
            out.raw.append(either([const(text) for text in texts]))
        others = [value for value in values if not isinstance(value, str)]
        if others:
            out.json.append(self._json({"enum": others}))

    def _typed(self, kind: str, schema: dict[str, Any], out: ParameterValues) -> None:
        own = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        if kind == "string":
            out.raw.append(self._raw(self.rewriter.enforceable(schema)))
        elif kind == "number" and not any(key in _IMPLIED_TYPES["number"] for key in own):
            out.json.append(ebnf(NUMBER))
        else:
            keys = {"$defs", "definitions"}.union(
                *(names for of, names in _IMPLIED_TYPES.items() if _family(kind) == of)
            )
            known = {key: value for key, value in own.items() if key in keys or key not in _TYPED}
            out.json.append(self._json({**known, "type": kind}))

    def _raw(self, schema: dict[str, Any]) -> Format:
        if isinstance(schema.get("pattern"), str):
            return regex(schema["pattern"])
        low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
        if low > MAX_LEAST:
            raise GrammarError(
                f"the schema uses `minLength` {low} of a string that is written as text, of which "
                f"at most {MAX_LEAST} can be enforced; ask for less"
            )
        if high is not None and high < low:
            raise GrammarError(f"the schema demands `minLength` {low} and `maxLength` {high}")
        if not low and high is None:
            return any_text(self._mark)
        # Counting and leaving out a whole word do not go together; one character does.
        first = self._mark[0]
        if high is not None and high <= MAX_UNROLLED:
            return ebnf(f"root ::= [^{first}]{{{low},{int(high)}}}")
        rest = any_text(first, max_chars=None if high is None else int(high) - low)
        return sequence(ebnf(f"root ::= [^{first}]{{{low}}}"), rest) if low else rest

    def _json(self, schema: dict[str, Any]) -> Format:
        made = self.rewriter.enforceable(schema)
        if _refers(made):
            for key in ("$defs", "definitions"):
                if key in self._root:
                    made[key] = self._named(key)
        excluded = _excluded(made, self._mark)
        return json_schema(made, excluded=excluded, max_whitespace=WHITESPACE)

    def _named(self, key: str) -> Any:
        """All named schemas; each value that refers to one carries them along, and pays."""
        if key not in self._definitions:
            made = {n: self.rewriter.enforceable(one) for n, one in self._root[key].items()}
            self._definitions[key] = made, len(compact_json(made))
        made, size = self._definitions[key]
        self._budget.pay_bytes(size)
        return made


_TYPED = frozenset(key for keys in _IMPLIED_TYPES.values() for key in keys) | {"type"}


def _family(kind: str) -> str:
    return "number" if kind == "integer" else kind


def _types(schema: dict[str, Any]) -> list[str]:
    """The types a schema allows; one without `type` is of the type its keywords speak of."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [one for one in kind if isinstance(one, str)]
    implied = [of for of, keys in _IMPLIED_TYPES.items() if any(key in schema for key in keys)]
    return implied[:1] or ["string", "number", *_OTHER_TYPES]


def _refers(schema: Any) -> bool:
    """Whether a reference occurs; those to elsewhere than definitions are refused."""
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if not reference.startswith(("#/$defs/", "#/definitions/")):
                raise GrammarError(
                    f"the schema uses `$ref` to {reference!r} inside a value; move what it means "
                    "to `$defs`"
                )
            return True
        return any(list(map(_refers, schema.values())))
    return isinstance(schema, list) and any(list(map(_refers, schema)))
