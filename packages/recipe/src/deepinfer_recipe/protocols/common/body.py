"""Shared parts of the request bodies: strict models and readable parse errors."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer_recipe.base.errors import RequestParseError
from deepinfer_recipe.conversation.tool_types import ToolDefinition


class Body(BaseModel):
    """A part of a request body: exact types, unknown fields ignored."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        frozen=True,
        populate_by_name=True,
        # Validators are built on first use: importing the package must stay cheap.
        defer_build=True,
    )


UInt8 = Annotated[int, Field(ge=0, le=255)]


class Declaration(Body):
    """A declared tool. It remembers what it was defined as: declarations are used again."""

    @cached_property
    def definitions(self) -> dict[str, ToolDefinition]:
        """The checked tool, by profile, once it was made."""
        return {}


UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
UInt64 = Annotated[int, Field(ge=0, le=2**64 - 1)]

M = TypeVar("M", bound=BaseModel)


def _field_path(body: Any, location: tuple[int | str, ...]) -> str:
    """Spell an error location as `messages[0].content`.

    The location also names union members and discriminator values; only steps that exist in
    the body, or the last one (a missing field), are real.
    """
    path = ""
    here = body
    for position, step in enumerate(location):
        is_last = position == len(location) - 1
        if isinstance(step, int):
            if isinstance(here, list) and step < len(here):
                path += f"[{step}]"
                here = here[step]
            continue
        if isinstance(here, dict) and (step in here or is_last):
            path += f".{step}" if path else step
            here = here.get(step)
    return path


_QUOTE = "'"
_MEDIA = re.compile("audio|video|speech|sound|movie")


def _unknown_member(details: Any) -> str:
    """Of a union of objects, the member asked for and those there are."""
    context = details["ctx"]
    key, tag, expected = (
        context["discriminator"].strip(_QUOTE),
        context["tag"],
        context["expected_tags"],
    )
    expected = expected.replace("'", "`")
    if _MEDIA.search(tag):
        return f"audio and video are not supported, got {key} `{tag[:40]}`, expected {expected}"
    return f"unknown {key} `{tag[:40]}`, expected one of {expected}"


def parse_body(model: type[M], body: Any) -> M:
    """Validate a decoded body. Raises `RequestParseError` naming the first field at fault."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        details = error.errors(include_url=False)
        # Of the members of a union the one that got furthest tells what was meant.
        worst = max(details, key=lambda d: len(d["loc"]))
        path = _field_path(body, worst["loc"])
        got = worst["input"]
        described = (
            "an object"
            if isinstance(got, dict)
            else "a list"
            if isinstance(got, list)
            else repr(got)
        )
        if worst["type"] == "missing":
            message = f"missing field `{path.rpartition('.')[2]}`"
        elif worst["type"] == "union_tag_invalid" and isinstance(got, dict):
            message = _unknown_member(worst)
        elif worst["type"] == "union_tag_not_found":
            message = f"missing field `{(worst.get('ctx') or {})['discriminator'].strip(_QUOTE)}`"
        else:
            wanted = "Input should be an object" if worst["type"] == "model_type" else worst["msg"]
            message = f"{wanted}, got {described[:80]}"
        where = f" (at {path})" if path else ""
        raise RequestParseError(
            f"invalid request body: {message}{where}", param=path or None
        ) from None
