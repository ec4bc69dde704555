"""Forms of an answer that requests ask for in the fields of other servers.

`structured_outputs` with one of `json`, `json_object`, `regex`, `choice`, `grammar`; and the older
`guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`. A grammar is EBNF in the notation
of GBNF, its first rule `root`. Thinking stays free, as with the formats of the protocols.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer_engine.adapters.recipe import ConversationRequest, OutputConstraint
from deepinfer_engine.codec.errors import InvalidRequest
from deepinfer_engine.core.types import Constraint

MAX_CHOICES = 1000
MAX_TEXT = 64 * 1024
_HOLE = "deepinfer: a form stands here"
"""A regular expression in whose place a grammar comes that the codec has no word for."""

Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]],
    Field(min_length=1, max_length=MAX_CHOICES),
]


class Structured(BaseModel):
    """One of them, and no other."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: Annotated[dict[str, Any] | Text | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None


class Fields(BaseModel):
    """The fields of a body."""

    model_config = ConfigDict(extra="ignore", strict=True)

    structured_outputs: Structured | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None


_MARKS = tuple(f'"{name}"'.encode() for name in Fields.model_fields)


@dataclass(frozen=True, slots=True)
class Form:
    """What a whole answer must look like, and the field that says so."""

    kind: Literal["json", "regex", "choice", "grammar"]
    value: str | tuple[str, ...]
    param: str

    def constraint(self) -> OutputConstraint:
        """The nearest that the codec knows; `fill` makes it whole."""
        if self.kind in ("json", "regex"):
            return OutputConstraint(cast("Any", self.kind), str(self.value))
        return OutputConstraint("regex", _HOLE)

    def fill(self, constraint: Constraint) -> Constraint:
        if self.kind in ("json", "regex"):
            return constraint
        filled = _filled(json.loads(constraint.grammar), self._node())
        return replace(constraint, grammar=json.dumps(filled, ensure_ascii=False))

    def _node(self) -> dict[str, Any]:
        if self.kind == "grammar":
            return {"type": "grammar", "grammar": self.value}
        texts = [{"type": "const_string", "value": text} for text in self.value]
        return texts[0] if len(texts) == 1 else {"type": "or", "elements": texts}


def read_form(body: bytes) -> Form | None:
    """The form that a body, known to be a JSON object, asks for. Raises InvalidRequest."""
    if not any(mark in body for mark in _MARKS):
        return None
    try:
        fields = Fields.model_validate(json.loads(body))
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{param}: {first['msg']}", param=param) from exc
    found = _older(fields)
    if fields.structured_outputs is not None:
        found += _newer(fields.structured_outputs)
    if len(found) > 1:
        names = " and ".join(form.param for form in found)
        raise InvalidRequest(f"{names}: an answer has one form; send one", param=found[1].param)
    return found[0] if found else None


def check_alone(request: ConversationRequest, form: Form) -> None:
    """Raises InvalidRequest where the request brings tools or a format of its own."""
    if request.conversation.tools or request.inference_options.output_constraint is not None:
        other = "tools" if request.conversation.tools else "a format of the answer"
        raise InvalidRequest(f"{form.param} cannot be combined with {other}", param=form.param)


def _older(fields: Fields) -> list[Form]:
    out: list[Form] = []
    if fields.guided_json is not None:
        out.append(Form("json", _schema(fields.guided_json, "guided_json"), "guided_json"))
    if fields.guided_regex is not None:
        out.append(Form("regex", fields.guided_regex, "guided_regex"))
    if fields.guided_choice is not None:
        out.append(Form("choice", tuple(fields.guided_choice), "guided_choice"))
    if fields.guided_grammar is not None:
        out.append(Form("grammar", fields.guided_grammar, "guided_grammar"))
    return out


def _newer(given: Structured) -> list[Form]:
    at = "structured_outputs."
    out: list[Form] = []
    if given.json_ is not None:
        out.append(Form("json", _schema(given.json_, at + "json"), at + "json"))
    if given.json_object:
        out.append(Form("json", "", at + "json_object"))
    if given.regex is not None:
        out.append(Form("regex", given.regex, at + "regex"))
    if given.choice is not None:
        out.append(Form("choice", tuple(given.choice), at + "choice"))
    if given.grammar is not None:
        out.append(Form("grammar", given.grammar, at + "grammar"))
    return out


def _schema(value: dict[str, Any] | str, param: str) -> str:
    """A schema as text; it may come as text, too."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param}: wanted a JSON Schema, got no JSON", param=param) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: wanted a JSON Schema, an object", param=param)
    return json.dumps(schema)


def _filled(node: Any, form: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_filled(item, form) for item in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    inner = cast("dict[str, Any]", node)
    if inner.get("type") == "regex" and inner.get("pattern") == _HOLE:
        return form
    return {key: _filled(value, form) for key, value in inner.items()}
