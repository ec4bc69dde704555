"""Normalising a `strict` schema: closed objects, all of whose properties are required.

As the reference does it, node by node only the keywords that its strict mode knows stay, in a
fixed order. A keyword that vanishes is a promise broken in silence, so otherwise all of them stay,
and the grammar holds each or refuses it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.protocols.common.schema_check import schema_problem

_STRING_FORMATS = ("email", "hostname", "ipv4", "ipv6", "uuid")
_LIST_TYPES = ("string", "number", "integer", "boolean", "null")
_TYPES = ("object", "string", "number", "integer", "boolean", "array", "null")
_BOUNDS = (
    "const",
    "default",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
)
_VALUES = ("const", "default")
"""Keywords whose value may be null."""
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref")
"""Beside these an object says only a part of what its properties are."""


@dataclass(frozen=True, slots=True)
class StrictRules:
    """How to word errors about a schema, and what goes beyond the reference.

    shape_error: begins the text of an error about a keyword of the wrong shape.
    root_name: what the root schema is called in errors.
    allows_empty_root: the root may have no properties (a tool without parameters).
    keeps_keywords: all keywords stay, `$defs` among them, whichever the reference knows.
    """

    shape_error: str
    root_name: str
    allows_empty_root: bool
    keeps_keywords: bool
    param: str

    def normalise(self, schema: Any) -> dict[str, Any]:
        """The normalised schema. Raises `ConversionError` for one that cannot be enforced."""
        if not isinstance(schema, dict) or schema.get("type") != "object":
            self._refuse_root(schema)
        if not self.keeps_keywords:
            return self._node(schema, is_root=True)
        root = self._whole(schema, is_root=True)
        problem = schema_problem(root)
        if problem is not None:
            raise self._shape(problem)
        return root

    def _whole(self, node: Any, *, is_root: bool = False, closes: bool = True) -> Any:
        """The schema with all its keywords, objects closed; null means that one is not there."""
        if not isinstance(node, dict):
            return node
        made: dict[str, Any] = {
            key: one for key, one in node.items() if one is not None or key in _VALUES
        }
        for key in _NAMED_SCHEMAS:
            named = made.get(key)
            if isinstance(named, dict):
                made[key] = {name: self._whole(one) for name, one in named.items()}
        for key in _SCHEMA_LISTS:
            members = made.get(key)
            if isinstance(members, list):
                # Members of `allOf` describe one object together: no member knows all of it.
                made[key] = [self._whole(one, closes=key != "allOf") for one in members]
        if "items" in made:
            made["items"] = self._whole(made["items"])
        kinds = made.get("type")
        is_object = "object" in kinds if isinstance(kinds, list) else kinds == "object"
        if is_object and closes and not any(key in made for key in _COMBINED):
            self._close(made, is_root=is_root)
        return made

    def _close(self, node: dict[str, Any], *, is_root: bool) -> None:
        properties = node.get("properties", {})
        if not isinstance(properties, dict):
            raise self._shape(f"field `properties`: expected an object, got {properties!r}")
        if not (properties or "patternProperties" in node) and not (
            is_root and self.allows_empty_root
        ):
            raise self._rule("An object with no properties is not allowed.")
        if node.get("additionalProperties"):
            raise self._rule("additionalProperties should not be true")
        required = node.get("required")
        if required is not None and not _has_kind(required, "a list of strings"):
            raise self._shape(f"field `required`: expected a list of strings, got {required!r}")
        self._check_required(required, properties)
        node.update(properties=properties, additionalProperties=False, required=list(properties))

    def _refuse_root(self, schema: Any) -> NoReturn:
        """A root that is no object: errors of shape inside it are told first."""
        try:
            self._node(schema, is_root=True)
        except ConversionError as error:
            if error.message.startswith(self.shape_error):
                raise
        raise self._rule(f"The top level of the {self.root_name} must be an object.")

    def _shape(self, text: str) -> ConversionError:
        return ConversionError(f"{self.shape_error}{text}", param=self.param)

    def _rule(self, text: str) -> ConversionError:
        return ConversionError(text, param=self.param)

    def _kept(self, node: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
        """The named keywords that are there and not null, their shape checked."""
        kept: dict[str, Any] = {}
        for key, kind in kinds.items():
            value = node.get(key)
            if value is None:
                continue
            if not _has_kind(value, kind):
                raise self._shape(f"field `{key}`: expected {kind}, got {value!r}")
            kept[key] = value
        return kept

    def _node(self, node: Any, *, is_root: bool = False) -> dict[str, Any]:
        if not isinstance(node, dict):
            raise self._shape("one of `type`, `anyOf`, `$ref` field is required")
        kind = node.get("type")
        if isinstance(kind, list):
            for member in kind:
                if member not in _LIST_TYPES:
                    known = ", ".join(f"`{name}`" for name in _LIST_TYPES)
                    raise self._shape(
                        f"field `type`: unknown variant `{member}`, expected one of {known}"
                    )
            return {"type": kind, **self._kept(node, {"description": "a string"})}
        if kind is not None:
            return self._typed(kind, node, is_root=is_root)
        if "anyOf" in node:
            return self._any_of(node)
        if "$ref" in node:
            if not isinstance(node["$ref"], str):
                raise self._shape(f"field `$ref`: expected a string, got {node['$ref']!r}")
            return {"$ref": node["$ref"]}
        raise self._shape("one of `type`, `anyOf`, `$ref` field is required")

    def _any_of(self, node: dict[str, Any]) -> dict[str, Any]:
        members = node["anyOf"]
        if not isinstance(members, list):
            raise self._shape(f"field `anyOf`: expected a list, got {members!r}")
        for member in members:
            # The reference knows only members of one type here, neither `$ref` nor a list.
            kind = member.get("type") if isinstance(member, dict) else None
            if not isinstance(kind, str):
                raise self._shape("field `anyOf`: missing field `type`")
        kept = self._kept(node, {"description": "a string"})
        return {"anyOf": [self._node(member) for member in members], **kept}

    def _typed(self, kind: Any, node: dict[str, Any], *, is_root: bool) -> dict[str, Any]:
        description = {"description": "a string"}
        match kind:
            case "string":
                strings = {"pattern": "a string", "format": "a string", "enum": "a list of strings"}
                kept = self._kept(node, description | strings)
                if kept.get("format", "uuid") not in _STRING_FORMATS:
                    known = ", ".join(f"`{name}`" for name in _STRING_FORMATS)
                    raise self._shape(
                        f"unknown variant `{kept['format']}`, expected one of {known}"
                    )
                return {"type": kind, **kept}
            case "number" | "integer":
                shape = "a number" if kind == "number" else "an integer"
                return {
                    "type": kind,
                    **self._kept(node, description | dict.fromkeys(_BOUNDS, shape)),
                }
            case "boolean" | "null":
                return {"type": kind, **self._kept(node, description)}
            case "array":
                if "items" not in node:
                    raise self._shape("missing field `items`")
                items = self._node(node["items"])
                return {"type": kind, "items": items, **self._kept(node, description)}
            case "object":
                return self._object(node, is_root=is_root)
            case _:
                known = ", ".join(f"`{name}`" for name in _TYPES)
                raise self._shape(f"unknown variant `{kind}`, expected one of {known}")

    def _object(self, node: dict[str, Any], *, is_root: bool) -> dict[str, Any]:
        kept = self._kept(
            node,
            {
                "properties": "an object",
                "additionalProperties": "a boolean",
                "required": "a list of strings",
                "description": "a string",
                "$def": "an object",
            },
        )
        properties: dict[str, Any] = kept.get("properties", {})
        normalised = {name: self._node(value) for name, value in properties.items()}
        if not properties and not (is_root and self.allows_empty_root):
            raise self._rule("An object with no properties is not allowed.")
        if kept.get("additionalProperties"):
            raise self._rule("additionalProperties should not be true")
        self._check_required(kept.get("required"), properties)
        out: dict[str, Any] = {
            "type": "object",
            "properties": normalised,
            "additionalProperties": False,
            "required": list(properties),
        }
        if "description" in kept:
            out["description"] = kept["description"]
        if "$def" in kept:
            out["$def"] = {name: self._node(value) for name, value in kept["$def"].items()}
        return out

    def _check_required(self, required: list[str] | None, properties: dict[str, Any]) -> None:
        if required is None:
            return
        seen: set[str] = set()
        for name in required:
            if name in seen:
                raise self._rule(f"Duplicate required property '{name}'")
            if name not in properties:
                raise self._rule(f"Required property '{name}' not found in object")
            seen.add(name)
        if len(seen) != len(properties):
            raise self._rule("Required properties must match all properties in the object")


def _has_kind(value: Any, kind: str) -> bool:
    match kind:
        case "a string":
            return isinstance(value, str)
        case "a boolean":
            return isinstance(value, bool)
        case "an object":
            return isinstance(value, dict)
        case "an integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "a number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case _:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
