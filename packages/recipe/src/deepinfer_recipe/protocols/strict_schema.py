"""Normalising a `strict` schema: the subset that constrained decoding enforces."""

from __future__ import annotations

from typing import Any

from deepinfer_recipe.errors import ConversionError

_STRING_FORMATS = ("email", "hostname", "ipv4", "ipv6", "uuid")
_SCALARS = ("string", "number", "integer", "boolean", "null")
_NUMBER_KEYS = (
    "description",
    "const",
    "default",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
)


def _kept(node: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: node[key] for key in keys if key in node}


def normalise_strict(schema: Any, *, keeps_definitions: bool = False) -> dict[str, Any]:
    """Reduce a schema to the keywords that strict mode enforces, in a fixed order.

    `keeps_definitions` also normalises and keeps `$defs` and `definitions`, so that `$ref`
    still resolves. Raises `ConversionError` for a schema that strict mode cannot enforce.
    """
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise ConversionError("Root schema must be an object")
    root = _object(schema, is_root=True)
    if keeps_definitions:
        for key in ("$defs", "definitions"):
            definitions = schema.get(key)
            if isinstance(definitions, dict):
                root[key] = {name: _node(value) for name, value in definitions.items()}
    return root


def _node(node: Any) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise ConversionError("Schema must be an object")
    if "$ref" in node:
        return {"$ref": node["$ref"]}
    if "anyOf" in node:
        return {
            "anyOf": [_node(member) for member in node["anyOf"]],
            **_kept(node, ("description",)),
        }
    kind = node.get("type")
    if kind is None:
        raise ConversionError("Schema must have a type, anyOf, or $ref")
    if isinstance(kind, list):
        for member in kind:
            if member not in _SCALARS:
                raise ConversionError(f"Unsupported type in type list: {member}")
        return {"type": kind, **_kept(node, ("description",))}
    match kind:
        case "string":
            if "format" in node and node["format"] not in _STRING_FORMATS:
                raise ConversionError(f"Unsupported string format: {node['format']}")
            return {"type": kind, **_kept(node, ("description", "pattern", "format", "enum"))}
        case "number" | "integer":
            return {"type": kind, **_kept(node, _NUMBER_KEYS)}
        case "boolean" | "null":
            return {"type": kind, **_kept(node, ("description",))}
        case "array":
            if "items" not in node:
                raise ConversionError("Array must have items")
            return {"type": kind, "items": _node(node["items"]), **_kept(node, ("description",))}
        case "object":
            return _object(node, is_root=False)
        case _:
            raise ConversionError(f"Unsupported type: {kind}")


def _object(node: dict[str, Any], *, is_root: bool) -> dict[str, Any]:
    properties = node.get("properties")
    if properties is None:
        if not is_root:
            raise ConversionError("Object must have properties")
        properties = {}
    additional = node.get("additionalProperties", False)
    if additional is not False:
        raise ConversionError("additionalProperties must be false")
    required = node.get("required")
    if required is not None and set(required) != set(properties):
        raise ConversionError("Required properties must match all properties in the object")
    out: dict[str, Any] = {
        "type": "object",
        "properties": {name: _node(value) for name, value in properties.items()},
        "additionalProperties": False,
        "required": list(properties),
        **_kept(node, ("description",)),
    }
    definitions = node.get("$def")
    if isinstance(definitions, dict):
        out["$def"] = {name: _node(value) for name, value in definitions.items()}
    return out
