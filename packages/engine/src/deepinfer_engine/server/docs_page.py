"""`/docs`: the routes and their schemas on one page that needs no script and no other server."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code,pre{font:14px/1.4 ui-monospace,monospace}pre{overflow:auto;background:#f4f4f4;"
    "padding:.75rem}summary{cursor:pointer;padding:.3rem 0}b{display:inline-block;width:4.5rem}"
    "@media (prefers-color-scheme:dark){body{background:#111;color:#ddd}pre{background:#222}}"
)


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """Every route with its description, parameters and schemas; `/openapi.json` for machines."""
    return HTMLResponse(page(request.app.openapi()))


def page(schema: dict[str, Any]) -> str:
    """HTML of an OpenAPI schema."""
    title = f"{schema['info']['title']} {schema['info']['version']}"
    rows: list[str] = []
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            detail = {k: v for k, v in route.items() if k in ("parameters", "requestBody")}
            text = json.dumps(detail, indent=2) if detail else "no parameters"
            rows.append(
                f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> "
                f"{escape(route.get('description', ''))}</summary>"
                f"<pre>{escape(text)}</pre></details>"
            )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>"
        '<p>For machines: <a href="openapi.json">openapi.json</a>.</p>' + "".join(rows) + "</html>"
    )
