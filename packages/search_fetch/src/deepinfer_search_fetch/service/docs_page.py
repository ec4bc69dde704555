"""`/docs`: the REST contract as one page without scripts, made from the OpenAPI document."""

from __future__ import annotations

from html import escape
from typing import Any, cast

from fastapi import FastAPI
from starlette.responses import Response

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "td,th{text-align:left;padding:.2em .8em .2em 0;vertical-align:top}code{font-size:.95em}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


def docs_response(app: FastAPI) -> Response:
    """The page; /openapi.json has the same for programs."""
    document = app.openapi()
    schemas: dict[str, Any] = document["components"]["schemas"]
    parts = [
        f"<h1>{escape(document['info']['title'])} {escape(document['info']['version'])}</h1>",
        "<p>Send the key as <code>Authorization: Bearer sk-…</code>. Every error has the body"
        ' <code>{"error": {code, message, type, retryable, request_id, details}}</code>.'
        " The same as <a href=/openapi.json>OpenAPI</a>.</p>",
    ]
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('description') or '')}</p>")
            parts.append(_fields(operation, schemas))
    body = f"<!doctype html><meta charset=utf-8><title>API</title><style>{_STYLE}</style>"
    headers = {"Content-Security-Policy": _POLICY}
    return Response(
        (body + "".join(parts)).encode(), media_type="text/html; charset=utf-8", headers=headers
    )


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    schema = (
        operation.get("requestBody", {})
        .get("content", {})
        .get("application/json", {})
        .get("schema", {})
    )
    model = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
    rows = [
        _row(name, field, name in model.get("required", ()))
        for name, field in model.get("properties", {}).items()
    ]
    rows += [
        _row(p["name"], p.get("schema", {}), bool(p.get("required")))
        for p in operation.get("parameters", ())
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _row(name: str, field: dict[str, Any], required: bool) -> str:
    facts = ["required"] if required else []
    if field.get("default") is not None:
        facts.append(f"default {field['default']}")
    labels = (("minimum", "from"), ("maximum", "to"), ("maxLength", "characters up to"))
    facts += [f"{label} {field[key]}" for key, label in labels if key in field]
    return (
        f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(field))}"
        f"<td>{escape(', '.join(facts))}</tr>"
    )


def _kind(field: dict[str, Any]) -> str:
    if "enum" in field:
        return " · ".join(map(str, field["enum"]))
    if "anyOf" in field:
        return " or ".join(_kind(cast(dict[str, Any], f)) for f in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    kind = str(field.get("type", "any"))
    return f"list of {_kind(field.get('items', {}))}" if kind == "array" else kind
