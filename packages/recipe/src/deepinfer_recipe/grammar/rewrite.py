"""Schemas rewritten so that the grammar library enforces what they say.

xgrammar reads a schema keyword by keyword and passes over combinations: `allOf` of several
members, `anyOf` beside other keywords, `required` names that are not declared. Those are
rewritten here into schemas that mean the same and that it does enforce. Formats of strings
become patterns, since its own are wider than what validators accept.
"""

from __future__ import annotations

import re
from typing import Any

from deepinfer_recipe.base.errors import GrammarError, GrammarTooComplex
from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.grammar.budget import Budget
from deepinfer_recipe.grammar.pattern_size import pattern_size

MAX_DEPTH = 64
ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "nullable",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "$comment",
        "$schema",
        "$vocabulary",
        "$id",
        "$anchor",
        "$dynamicAnchor",
    )
)
_MAX_PAIRS = 64
_NEVER = (
    *("not", "if", "minContains", "maxContains", "contains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    "additionalItems",
)
"""Keywords that no grammar here holds an answer to, whatever they say."""
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")

_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"
_IPV6 = "|".join(
    (
        f"({_GROUP}:){{7}}{_GROUP}",
        *(f"({_GROUP}:){{1,{n}}}(:{_GROUP}){{1,{7 - n}}}" for n in range(1, 7)),
        f"({_GROUP}:){{1,7}}:",
        f":((:{_GROUP}){{1,7}}|:)",
    )
)
_DAY = (
    r"(\d{4}-(02-(0[1-9]|1\d|2[0-8])|(0[13-9]|1[0-2])-(0[1-9]|[12]\d|30)|(0[13578]|1[02])-31)"
    r"|\d\d(0[48]|[2468][048]|[13579][26])-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,22}[a-zA-Z0-9])?"
_URI = rf"https?://{_LABEL}(\.{_LABEL}){{1,3}}(/[a-zA-Z0-9._~-]{{1,24}}){{0,6}}/?"
_POINTER = r"(/[a-zA-Z0-9_-]{1,24}){0,6}"
_OWN_FORMATS = {
    "email": rf"[a-zA-Z0-9_]{{1,20}}([.+-][a-zA-Z0-9_]{{1,8}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,4}}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": f"({_IPV6})",
    "uuid": rf"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "duration": r"P(\d{1,4}W|\d{1,4}D(T\d{1,4}H)?|T\d{1,4}[HMS])",
    "uri": _URI,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9]\d{{0,3}})(#|{_POINTER})",
    "regex": r"[a-zA-Z0-9 _-]{0,40}",
}
FORMATS = {
    **_OWN_FORMATS,
    **dict.fromkeys(("uri-reference", "uri-template", "iri", "iri-reference"), _URI),
    "idn-email": _OWN_FORMATS["email"],
    "idn-hostname": _OWN_FORMATS["hostname"],
}
"""The formats of JSON Schema: of what each allows the part that every validator accepts. Other
names say nothing by that standard."""


_PATTERN_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\)\?(?!\?)", re.DOTALL)


def safe_pattern(pattern: str) -> str:
    """The expression with every optional group counted instead.

    In JSON strings xgrammar 0.2.9 reads `(ab+)?` as if `b+` could come without `a`; `(ab+){0,1}`
    it reads right.
    """
    return _PATTERN_PARTS.sub(lambda m: "){0,1}" if m.group() == ")?" else m.group(), pattern)


class SchemaRewriter:
    """Rewrites the schemas of one document, within one budget.

    root: where references lead.
    """

    def __init__(self, root: Any, budget: Budget | None = None) -> None:
        self.root = root
        self.budget = budget or Budget()
        self._id = root.get("$id") if isinstance(root, dict) else None

    def enforceable(self, schema: Any, depth: int = 0) -> Any:
        """A schema that allows the same values and whose keywords xgrammar enforces one by one.

        Raises `GrammarError` for keywords that contradict or nest too deeply, and, naming it, for
        a keyword that no grammar here can hold an answer to.
        """
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema nests deeper than {MAX_DEPTH} levels; make it flatter")
        self.budget.pay_nodes()
        if not isinstance(schema, dict):
            return schema
        made = self.flattened(schema)
        self.check_keywords(made)
        for key in made.keys() & set(_NEVER):
            del made[key]  # it asks nothing
        if "pattern" not in made and made.get("format") in FORMATS:
            made["pattern"] = FORMATS[made.pop("format")]
        if isinstance(made.get("pattern"), str):
            self._drop_lengths(made)
            made["pattern"] = safe_pattern(made["pattern"])
            self.budget.pay_pattern(made["pattern"])
        for key in ("enum", "const"):
            if key in made:
                self.budget.pay_bytes(len(compact_json(made[key])))
        for key in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(made.get(key), dict):
                made[key] = {
                    name: self.enforceable(one, depth + 1) for name, one in made[key].items()
                }
        for key in ("items", "additionalProperties"):
            if key in made:
                made[key] = self.enforceable(made[key], depth + 1)
        for key in ("anyOf", "oneOf", "prefixItems"):
            if isinstance(made.get(key), list):
                made[key] = [self.enforceable(one, depth + 1) for one in made[key]]
        _declare_required(made)
        return made

    def flattened(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Without `allOf`, and without keywords beside `anyOf` and `oneOf`."""
        self.budget.pay_nodes(1 + len(schema))
        made: Any = {key: value for key, value in schema.items() if key != "allOf"}
        for member in schema.get("allOf", ()):
            made = self.merge(made, self.flattened(member) if isinstance(member, dict) else member)
        if not isinstance(made, dict):
            return {"enum": []} if made is False else {}
        for key in ("anyOf", "oneOf"):
            members = made.get(key)
            apart = {key, "$defs", "definitions"} | ANNOTATIONS
            beside = {name: value for name, value in made.items() if name not in apart}
            if isinstance(members, list) and beside:
                rest = {name: value for name, value in made.items() if name in apart}
                possible = self._possible(beside, members)
                if not possible:
                    raise GrammarError(
                        f"none of the schema's `{key}` goes with the keywords beside it"
                    )
                made = {**rest, key: possible}
        return made

    def _possible(self, beside: Any, members: list[Any]) -> list[Any]:
        """The alternatives that go with what stands beside them, merged into it."""
        possible: list[Any] = []
        for member in members:
            try:
                possible.append(
                    self.merge(
                        beside, self.flattened(member) if isinstance(member, dict) else member
                    )
                )
            except GrammarTooComplex:
                raise
            except GrammarError:  # they contradict: nothing is both
                continue
        return possible

    def merge(self, left: Any, right: Any) -> Any:
        """The schema of what both allow. Raises `GrammarError` where they cannot be combined."""
        if left is True or left == {}:
            return right
        if right is True or right == {}:
            return left
        if not (isinstance(left, dict) and isinstance(right, dict)):
            return False
        self.budget.pay_nodes(len(left) + len(right))
        out: dict[str, Any] = dict(left)
        for key, value in right.items():
            if key not in out or out[key] == value or key in ANNOTATIONS:
                out[key] = value
            else:
                out[key] = self._both(key, out[key], value)
        return out

    def _both(self, key: str, left: Any, right: Any) -> Any:
        """What one keyword says where two schemas of one value use it."""
        if key in _LOWER_BOUNDS:
            return max(left, right)
        if key in _UPPER_BOUNDS:
            return min(left, right)
        match key:
            case "type":
                return _both_types(left, right)
            case "anyOf" | "oneOf":
                return self._both_alternatives(left, right)
            case "properties" | "patternProperties" | "$defs" | "definitions":
                return left | {
                    name: self.merge(left[name], one) if name in left else one
                    for name, one in right.items()
                }
            case "required":
                return [*left, *(name for name in right if name not in left)]
            case "enum":
                return [value for value in left if value in right]
            case "items" | "additionalProperties":
                return self.merge(left, right)
            case "uniqueItems":
                return left or right
            case _:
                raise GrammarError(
                    f"the schema demands two different `{key}` of one value; state one of them"
                )

    def _both_alternatives(self, left: list[Any], right: list[Any]) -> list[Any]:
        """Every pair that goes together."""
        if len(left) * len(right) > _MAX_PAIRS:
            raise GrammarError(
                f"the schema combines {len(left)} and {len(right)} alternatives of one value; at "
                f"most {_MAX_PAIRS} pairs are enforced"
            )
        pairs = [one for member in left for one in self._possible(member, right)]
        if not pairs:
            raise GrammarError("the schema demands alternatives of one value that contradict")
        return pairs

    # -- what no grammar here holds ----------------------------------------------------

    def check_keywords(self, schema: dict[str, Any]) -> None:
        """Raise `GrammarError` naming a keyword that would be passed over."""
        for key in _NEVER:
            if key in schema and not _asks_nothing(key, schema):
                raise _not_held(key)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            _check_local(reference)
        if "$id" in schema and schema["$id"] != self._id:
            # References below it would lead into it, not into the document.
            raise _not_held("$id")
        if isinstance(schema.get("items"), list):
            raise GrammarError(
                "the schema uses `items` with a list, as drafts before 2020-12 did, which cannot "
                "be enforced; use `prefixItems`"
            )
        if schema.get("uniqueItems") is True and schema.get("maxItems", 2) > 1:
            raise _not_held("uniqueItems")
        step = schema.get("multipleOf", 1)
        if step != 1 or (step == 1 and "multipleOf" in schema and schema.get("type") != "integer"):
            raise _not_held("multipleOf")
        if schema.get("minProperties", 0) > len(set(schema.get("required") or ())):
            raise _not_held("minProperties")
        if "maxProperties" in schema:
            is_closed = schema.get("additionalProperties") is False
            declared = len(schema.get("properties") or ())
            if not is_closed or "patternProperties" in schema or schema["maxProperties"] < declared:
                raise _not_held("maxProperties")
        members = schema.get("oneOf")
        if isinstance(members, list):
            self._check_one_of(members)

    def _check_one_of(self, members: list[Any]) -> None:
        """Alternatives that may overlap would let a value through that fits two of them."""
        for place, one in enumerate(members):
            self.budget.pay_nodes(len(members) - place)
            for other in members[place + 1 :]:
                if not self._are_apart(one, other):
                    raise GrammarError(
                        "the schema uses `oneOf` with alternatives that one value may fit at "
                        "once, which cannot be enforced; use `anyOf`, or tell them apart by a "
                        "required constant"
                    )

    def _are_apart(self, left: Any, right: Any, depth: int = 0) -> bool:
        """Whether certainly no value fits both."""
        self.budget.pay_nodes()
        left, right = self._resolved(left), self._resolved(right)
        if left is False or right is False:
            return True
        if not isinstance(left, dict) or not isinstance(right, dict) or depth > 4:
            return False
        constants = [_constants(left), _constants(right)]
        if constants[0] is not None and constants[1] is not None:
            return not constants[0] & constants[1]
        types = [_kinds(left), _kinds(right)]
        if not types[0] & types[1]:
            return True
        if types[0] & types[1] == {"number"}:
            return _ends_before(left, right) or _ends_before(right, left)
        if types[0] & types[1] != {"object"}:
            return False
        required = set(left.get("required") or ()) & set(right.get("required") or ())
        properties = [left.get("properties") or {}, right.get("properties") or {}]
        if any(
            self._are_apart(properties[0].get(name, True), properties[1].get(name, True), depth + 1)
            for name in sorted(required)
        ):
            return True
        return _lacks(left, right) or _lacks(right, left)

    def _resolved(self, schema: Any) -> Any:
        for _ in range(8):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                break
            schema = target(self.root, reference)
        return schema

    def _drop_lengths(self, schema: dict[str, Any]) -> None:
        """Bounds of length beside a pattern: dropped where it keeps them by itself."""
        size = pattern_size(schema["pattern"])
        for key in ("minLength", "maxLength"):
            bound = schema.pop(key, None)
            if bound is None or (key == "minLength" and size.shortest >= bound):
                continue
            if key == "minLength" or size.longest > bound:
                raise GrammarError(
                    f"the schema uses `{key}` beside a pattern or format that does not keep it by "
                    "itself, which cannot be enforced; count in the pattern"
                )


def _not_held(key: str) -> GrammarError:
    return GrammarError(f"the schema uses `{key}`, which cannot be enforced; leave it out")


def _check_local(reference: str) -> None:
    if reference != "#" and not reference.startswith("#/"):
        raise GrammarError(
            f"the schema uses `$ref` to {reference!r}; only `#/...` is followed, name it so"
        )


def target(root: Any, reference: str) -> Any:
    """What a reference inside a document leads to. Raises `GrammarError`."""
    found: Any = root
    _check_local(reference)
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            raise GrammarError(f"the schema uses `$ref` to {reference!r}, which is no named schema")
        found = found[key]
    return found


def _both_types(left: Any, right: Any) -> Any:
    one, other = ([kind] if isinstance(kind, str) else list(kind) for kind in (left, right))
    kept = [kind for kind in one if kind in other or (kind == "integer" and "number" in other)] + [
        kind for kind in other if kind == "integer" and "number" in one and kind not in one
    ]
    if not kept:
        raise GrammarError(f"the schema demands the types {left!r} and {right!r} of one value")
    return kept[0] if len(kept) == 1 else kept


def _constants(schema: dict[str, Any]) -> set[str] | None:
    """The values an `enum` or `const` leaves, as JSON; None where there is neither."""
    if "const" in schema:
        return {compact_json(schema["const"])}
    values = schema.get("enum")
    return {compact_json(value) for value in values} if isinstance(values, list) else None


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types a schema allows; whole numbers are numbers."""
    kind = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if kind is None and isinstance(values, list):
        return {_kind_of(value) for value in values}
    if kind is None:
        return {"array", "boolean", "null", "number", "object", "string"}
    kinds = [kind] if isinstance(kind, str) else kind
    return {"number" if one == "integer" else one for one in kinds}


def _kind_of(value: Any) -> str:
    for kind, types in (
        ("null", type(None)),
        ("boolean", bool),
        ("number", int | float),
        ("string", str),
        ("array", list),
    ):
        if isinstance(value, types):
            return kind
    return "object"


def _ends_before(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether the numbers of one end before those of the other begin."""
    tops = [left[key] for key in ("maximum", "exclusiveMaximum") if key in left]
    bottoms = [right[key] for key in ("minimum", "exclusiveMinimum") if key in right]
    if not tops or not bottoms:
        return False
    top, bottom = min(tops), max(bottoms)
    touches = "maximum" in left and "minimum" in right
    return top < bottom or (
        top == bottom and not (touches and left["maximum"] == right["minimum"] == top)
    )


def _lacks(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether one demands a property that the other, which is closed, does not have."""
    if right.get("additionalProperties") is not False or "patternProperties" in right:
        return False
    return bool(set(left.get("required") or ()) - set(right.get("properties") or {}))


def _declare_required(schema: dict[str, Any]) -> None:
    required = schema.get("required")
    if not isinstance(required, list):
        return
    properties = dict(schema.get("properties") or {})
    rest = schema.get("additionalProperties", True)
    for name in required:
        properties.setdefault(name, rest)
    if properties:
        schema["properties"] = properties


def _asks_nothing(key: str, schema: dict[str, Any]) -> bool:
    """Whether a keyword holds for every value, as `propertyNames` does in Zod's records."""
    if key == "if":
        return not {"then", "else"} & set(schema)
    return key == "propertyNames" and schema[key] in (True, {}, {"type": "string"})
