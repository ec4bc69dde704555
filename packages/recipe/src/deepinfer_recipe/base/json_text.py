"""JSON in and out, with the number rules that prompts need.

Reading is strict: no NaN, no trailing commas, no byte order mark, no lone surrogates, no
number outside the double range, at most 127 levels. Writing is Python's json style
(separators `", "` and `": "`, non-ASCII kept), which is the style the models were trained on.

Where the compiled routines of `native` are there, they do the work. They refuse (`ValueError`)
whatever is wrong or unusual, and the Python form below then gives the result or the error.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any

from deepinfer_recipe.base.errors import RequestParseError
from deepinfer_recipe.native import routines as native

MAX_DEPTH = 127
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
# A string that does not end reaches to the end, so that no text is scanned twice.
_STRING_OR_NUMBER = re.compile(
    r'"(?:[^"\\]|\\.)*"?|-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?', re.DOTALL
)
_INT64_MIN = -(2**63)
_UINT64_MAX = 2**64 - 1

_prompt_encoder = json.JSONEncoder(ensure_ascii=False).encode
_compact_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def prompt_json(value: Any) -> str:
    """Render a value the way prompts show JSON."""
    if native is not None:
        try:
            return native.prompt_json(value)
        except ValueError:
            pass
    return _prompt_encoder(value)


def compact_json(value: Any) -> str:
    """Render a value without spaces, as wire bodies show JSON."""
    if native is not None:
        try:
            return native.compact_json(value)
        except ValueError:
            pass
    return _compact_encoder(value)


def _between(head: str, text: str, tail: str) -> str:
    return f"{head}{encode_basestring(text)}{tail}"


quote: Callable[[str], str] = encode_basestring if native is None else native.quote
"""A text as a JSON string, non-ASCII kept."""

between: Callable[[str, str, str], str] = _between if native is None else native.between
"""`head` + `quote(text)` + `tail`: the JSON of an event around its text."""


def _integer(digits: str) -> int | float:
    if len(digits) < 19:
        return -0.0 if digits == "-0" else int(digits)
    # Integers outside 64 bits become doubles; far longer ones would be slow to convert.
    if len(digits) <= 21:
        value = int(digits)
        if _INT64_MIN <= value <= _UINT64_MAX:
            return value
    return _double(digits)


def _double(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_int=_integer, parse_float=_double, parse_constant=_constant)


def _has_lone_surrogate(value: Any) -> bool:
    try:
        _prompt_encoder(value).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for container in level
            for child in (container.values() if type(container) is dict else container)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True


def loads(text: str) -> Any:
    """Parse JSON text strictly. Raises `ValueError` (also for too deep nesting)."""
    if native is not None:
        try:
            return native.loads(text)
        except ValueError:
            pass
    return _loads(text)


def _loads(text: str) -> Any:
    try:
        value = _decoder.decode(text)
    except RecursionError:
        raise ValueError("recursion limit exceeded") from None
    if _SURROGATE_ESCAPE.search(text) and _has_lone_surrogate(value):
        raise ValueError("lone surrogate in a string")
    if (
        text.count("[") + text.count("{") > MAX_DEPTH
        and isinstance(value, dict | list)
        and _deeper_than([value], MAX_DEPTH)
    ):
        raise ValueError("recursion limit exceeded")
    return value


def load_body(body: Any) -> Any:
    """Parse a request body: bytes or text of JSON, or the object it decodes to.

    An object follows the same rules as the JSON it would be sent as. Raises
    `RequestParseError`.
    """
    if native is not None:
        try:
            return native.loads(body) if isinstance(body, bytes | str) else native.copy(body)
        except ValueError:
            pass
    return _load_body(body)


def _load_body(body: Any) -> Any:
    kind = "invalid JSON request"
    try:
        if isinstance(body, bytes | bytearray | memoryview):
            return _loads(bytes(body).decode("utf-8"))
        if not isinstance(body, str):
            kind = "invalid request body"
            body = json.dumps(body, ensure_ascii=False, allow_nan=False)
        body.encode("utf-8")
        return _loads(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestParseError(f"{kind}: {error}") from None


def saturated(text: str) -> str:
    """JSON text with each number beyond a double replaced by the double nearest to it."""
    return _STRING_OR_NUMBER.sub(_saturated, text)


def _saturated(match: re.Match[str]) -> str:
    token = match.group()
    if token[0] == '"' or not math.isinf(float(token)):
        return token
    return f"{'-' if token[0] == '-' else ''}{sys.float_info.max!r}"


def parse_object(text: str) -> dict[str, Any] | None:
    """Parse call arguments: the object they encode, or None if they are not one."""
    try:
        value = loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
