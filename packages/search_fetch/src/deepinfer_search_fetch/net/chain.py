"""A request and its redirects, each hop checked from the start."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import UpstreamError
from deepinfer_search_fetch.models import RedirectHop
from deepinfer_search_fetch.net.transport import Response, Transport
from deepinfer_search_fetch.urls import Url

REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
MAX_REFRESH_DELAY_SECONDS = 5.0
_META_REFRESH = re.compile(
    rb"""<meta\s[^>]{0,200}?http-equiv\s*=\s*["']?refresh["'\s>][^>]{0,2000}""", re.I
)
# A tag inside a comment or a script's text is not one.
_NOT_MARKUP = re.compile(rb"<!--.*?-->|<(script|style|template)\b.*?</\1\s*>", re.I | re.S)
_META_CONTENT = re.compile(rb"""content\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]+))""", re.I)
_REFRESH = re.compile(r"""\s*(\d+(?:\.\d*)?)\s*[;,]\s*(?:url\s*=\s*)?["']?([^"']+)""", re.I)
_META_WINDOW = 16 * 1024
_MAX_COOKIES = 20
_MAX_COOKIE_CHARS = 4096
_COOKIE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_COOKIE_VALUE = re.compile(r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e\"]{0,4000}")


@dataclass(frozen=True, slots=True)
class Page:
    """The final response of a chain and the hops that led to it."""

    requested: Url
    response: Response
    hops: tuple[RedirectHop, ...]

    @property
    def final(self) -> Url:
        return self.response.url


Gate = Callable[[Url], Awaitable[None]]
Get = Callable[[Url, Sequence[tuple[str, str]]], Awaitable[Response]]


async def follow(
    transport: Transport,
    url: Url,
    headers: Sequence[tuple[str, str]],
    limits: Limits,
    *,
    gate: Gate | None = None,
    get: Get | None = None,
    max_redirects: int | None = None,
) -> Page:
    """GET `url` and follow up to `limits.redirects` redirects (and a few refreshes).

    gate: called before each hop's request; raises to stop (robots, domain policy).
    get: performs one request; defaults to `transport.get` (the pipeline wraps it in a host slot).
    """
    get = get or transport.get
    cap = limits.redirects if max_redirects is None else max_redirects
    hops: list[RedirectHop] = []
    current = url.without_fragment()
    seen = {str(current)}
    refreshes = 0
    jar = CookieJar()
    while True:
        if gate is not None:
            await gate(current)
        response = await get(current, [*headers, *jar.headers(current)])
        jar.take(response)
        reference = _location(response)
        if reference is None and response.status < 400 and refreshes < limits.refresh_redirects:
            reference = _refresh(response)
            refreshes += reference is not None
        if reference is None:
            return Page(url, response, tuple(hops))
        target = urls.join(current, reference).without_fragment()
        if reference and target == current and response.status == 200:
            return Page(url, response, tuple(hops))  # a page that reloads itself is not a redirect
        hops.append(RedirectHop(from_url=str(current), to_url=str(target), status=response.status))
        if str(target) in seen:
            raise UpstreamError("redirect_loop", "redirects lead back to an earlier URL")
        if len(hops) > cap:
            raise UpstreamError(
                "too_many_redirects",
                f"more than {cap} redirects",
                details={"limit": "redirects", "value": cap},
            )
        # Conditional headers belong to the first URL only.
        headers = [(k, v) for k, v in headers if not k.lower().startswith("if-")]
        seen.add(str(target))
        current = target


class CookieJar:
    """The cookies of one redirect chain; consent and login walls send back who has none.

    A cookie goes back to the host that set it, or to the hosts below a domain it may speak for.
    """

    def __init__(self) -> None:
        self._cookies: dict[tuple[str, str], tuple[str, str, bool, bool]] = {}

    def take(self, response: Response) -> None:
        """Keep what the response sets, at most a few."""
        host = response.url.host
        for name, value in response.headers:
            if name != "set-cookie" or len(value) > _MAX_COOKIE_CHARS:
                continue
            pair, *attributes = value.split(";")
            key, equals, text = (part.strip() for part in pair.partition("="))
            named = {
                k.strip().lower(): v.strip().lower()
                for k, _, v in (a.partition("=") for a in attributes)
            }
            domain = named.get("domain", "").lstrip(".")
            if not equals or not _COOKIE.fullmatch(key) or not _COOKIE_VALUE.fullmatch(text):
                continue
            if domain and not (
                urls.domain_matches(host, domain)
                and urls.registrable_domain(domain) == urls.registrable_domain(host)
            ):
                continue
            path = named.get("path", "/")
            if named.get("max-age", "1").startswith(("0", "-")):
                self._cookies.pop((domain or host, key), None)
            elif len(self._cookies) < _MAX_COOKIES:
                kept = (
                    text,
                    path if path.startswith("/") else "/",
                    bool(domain),
                    "secure" in named,
                )
                self._cookies[(domain or host, key)] = kept

    def headers(self, url: Url) -> list[tuple[str, str]]:
        """The Cookie header for a request, none if there is nothing to send."""
        sent: list[str] = []
        for (host, key), (value, path, below, secure) in self._cookies.items():
            same = host == url.host or (below and urls.domain_matches(url.host, host))
            if same and url.path.startswith(path) and (not secure or url.scheme == "https"):
                sent.append(f"{key}={value}")
        return [("Cookie", "; ".join(sent))] if sent else []


def _location(response: Response) -> str | None:
    if response.status not in REDIRECT_STATUSES:
        return None
    location = response.header("location")
    # Header bytes were read as latin-1; servers put raw UTF-8 here.
    try:
        return location.encode("latin-1").decode("utf-8") if location else None
    except UnicodeError:
        return location


def _refresh(response: Response) -> str | None:
    value = response.header("refresh")
    if value is None:
        tag = _META_REFRESH.search(_NOT_MARKUP.sub(b"", response.body[:_META_WINDOW]))
        content = _META_CONTENT.search(tag.group()) if tag else None
        if content is None:
            return None
        raw = next(group for group in content.groups() if group is not None)
        value = raw.decode("utf-8", "replace").replace("&amp;", "&")
    match = _REFRESH.match(value)
    if match is None or float(match.group(1)) > MAX_REFRESH_DELAY_SECONDS:
        return None
    return match.group(2).strip()
