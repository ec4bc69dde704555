"""The page at `/`: a chat and the server's state. Three files, and nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Response

router = APIRouter(include_in_schema=False)

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    # Its own files, its own server, and nothing that is written into the page.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/")
async def index() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/page/app.css")
async def style() -> Response:
    return _file("app.css")


@router.get("/page/app.js")
async def script() -> Response:
    return _file("app.js")


def _file(name: str) -> Response:
    return Response(_read(name), headers={**_HEADERS, "content-type": _TYPES[name]})


@cache
def _read(name: str) -> bytes:
    return files("deepinfer_engine.server").joinpath("page", name).read_bytes()
