"""Constraints for offline use: `SamplingParams(constraint=json_schema({...}))`.

Requests over HTTP bring theirs in the fields of their protocol.
"""

from __future__ import annotations

import json
from typing import Any

from deepinfer_engine.core.types import Constraint


def json_schema(schema: dict[str, Any]) -> Constraint:
    """The whole output is JSON that the schema allows.

    Raises ConstraintError for a schema that cannot be enforced, SchemaTooComplex for one that is
    too large. One that takes too long to compile raises when it is used.
    """
    return _made("json", json.dumps(schema))


def json_object() -> Constraint:
    """The whole output is a JSON object."""
    return _made("json", "")


def regex(pattern: str) -> Constraint:
    """The whole output is text that the whole pattern matches."""
    return _made("regex", pattern)


def _made(kind: Any, schema: str) -> Constraint:
    from deepinfer_engine.codec.grammars import free_constraint

    return free_constraint(kind, schema)
