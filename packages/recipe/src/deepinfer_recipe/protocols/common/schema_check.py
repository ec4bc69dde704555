"""Checking that a client's JSON Schema is one, without ever fetching anything."""

from __future__ import annotations

from typing import Any

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.protocols.common.plain_schema import is_plain_schema


def _refuse(uri: str) -> Any:
    # A schema that points elsewhere must not make the server connect anywhere.
    raise ValueError(f"Retrieval is disabled, cannot fetch {uri}")


def schema_problem(schema: Any) -> str | None:
    """What is wrong with a JSON Schema; None if it is valid and all its references resolve."""
    if not isinstance(schema, dict | bool):
        return f'{compact_json(schema)} is not of types "boolean", "object"'
    if is_plain_schema(schema):
        return None
    import jsonschema_rs

    try:
        jsonschema_rs.validator_for(schema, retriever=_refuse)
    except jsonschema_rs.ValidationError as error:
        return str(error.message).replace("ValueError: ", "")
    except ValueError as error:
        return str(error)
    return None


def require_schema(schema: Any, what: str, param: str) -> None:
    """Raise `ConversionError` "`what`: problem" unless `schema` is a JSON Schema."""
    problem = schema_problem(schema)
    if problem is not None:
        raise ConversionError(f"{what}: {problem}", param=param)
