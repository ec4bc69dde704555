"""The page at `/` to try both APIs by hand: no asset from elsewhere, and a policy that says so."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.S)


@cache
def _page() -> tuple[bytes, str]:
    """The HTML, and a Content-Security-Policy that allows its own script and style by hash."""
    text = files("deepinfer_search_fetch.service").joinpath("try_page.html").read_text("utf-8")
    allowed: dict[str, list[str]] = {"script": [], "style": []}
    for kind, code in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        allowed[kind].append(f"'sha256-{digest}'")
    policy = (
        "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none';"
        f" frame-ancestors 'none'; script-src {' '.join(allowed['script'])};"
        f" style-src {' '.join(allowed['style'])}"
    )
    return text.encode(), policy


def page_response() -> Response:
    """The page with its policy."""
    body, policy = _page()
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return Response(body, media_type="text/html; charset=utf-8", headers=headers)
