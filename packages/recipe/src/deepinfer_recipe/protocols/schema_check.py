"""Checking that a client's JSON Schema is one, without ever fetching anything."""

from __future__ import annotations

import marshal
from collections import OrderedDict
from typing import Any

from deepinfer_recipe.errors import ConversionError
from deepinfer_recipe.json_text import compact_json

_MAX_ENTRIES = 512
_MAX_KEY_BYTES = 65536
_known_good: OrderedDict[bytes, None] = OrderedDict()


def _refuse(uri: str) -> Any:
    # A schema that points elsewhere must not make the server connect anywhere.
    raise ValueError(f"Retrieval is disabled, cannot fetch {uri}")


def schema_problem(schema: Any) -> str | None:
    """What is wrong with a JSON Schema; None if it is valid and all its references resolve."""
    if not isinstance(schema, dict | bool):
        return f'{compact_json(schema)} is not of types "boolean", "object"'
    # Tool lists repeat from turn to turn. The bytes of `marshal` (version 2: no sharing, so
    # equal values give equal bytes) are the cheapest exact key; they are never read back.
    key = marshal.dumps(schema, 2)
    if key in _known_good:
        _known_good.move_to_end(key)
        return None
    import jsonschema_rs

    try:
        jsonschema_rs.validator_for(schema, retriever=_refuse)
    except jsonschema_rs.ValidationError as error:
        return str(error.message).replace("ValueError: ", "")
    except ValueError as error:
        return str(error)
    if len(key) <= _MAX_KEY_BYTES:
        _known_good[key] = None
        if len(_known_good) > _MAX_ENTRIES:
            _known_good.popitem(last=False)
    return None


def require_schema(schema: Any, what: str, param: str) -> None:
    """Raise `ConversionError` "`what`: problem" unless `schema` is a JSON Schema."""
    problem = schema_problem(schema)
    if problem is not None:
        raise ConversionError(f"{what}: {problem}", param=param)
