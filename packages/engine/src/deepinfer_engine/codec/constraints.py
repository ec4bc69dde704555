"""Constraints for offline use: `SamplingParams(constraint=json_schema({...}))`.

Requests over HTTP bring theirs in the fields of their protocol.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deepinfer_engine.core.types import Constraint
from deepinfer_engine.errors import RequestError


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


def choice(options: Sequence[str]) -> Constraint:
    """The whole output is one of these texts. Raises RequestError for none, or an empty one."""
    if not options or isinstance(options, str) or not all(options):
        raise RequestError("choice: wanted texts to choose from, none of them empty")
    return _formed("choice", tuple(options))


def ebnf(rules: str) -> Constraint:
    """The whole output is what the grammar derives from its rule `root`; EBNF as in GBNF.

    Raises RequestError for none; what is wrong with the rules is told by ConstraintError when they
    are used.
    """
    if not rules.strip():
        raise RequestError("ebnf: wanted rules, the first of them `root`")
    return _formed("grammar", rules)


def _formed(kind: Any, value: str | tuple[str, ...]) -> Constraint:
    from deepinfer_engine.codec.grammars import form_constraint
    from deepinfer_engine.codec.structured import Form

    return form_constraint(Form(kind, value, kind))


def _made(kind: Any, schema: str) -> Constraint:
    from deepinfer_engine.codec.grammars import free_constraint

    return free_constraint(kind, schema)
