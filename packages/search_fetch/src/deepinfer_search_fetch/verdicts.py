"""Answers that are not the page: error statuses, bot and consent walls, soft 404s."""

from __future__ import annotations

import re

from deepinfer_search_fetch.errors import ContentError, SearchFetchError, UpstreamError
from deepinfer_search_fetch.extract import Extraction
from deepinfer_search_fetch.net.transport import Response

_WALL_CHARS = 1500
_SOFT_404_CHARS = 1000
_MARK_WINDOW = 32 * 1024
_WALL_STATUSES = frozenset({401, 403, 405, 429, 503})
_WALL_MARKS = (
    b"/cdn-cgi/challenge-platform/",
    b"_cf_chl_opt",
    b"cf-browser-verification",
    b"captcha-delivery.com",
    b"px-captcha",
    b"_Incapsula_Resource",
    b"awsWafCookieDomainList",
    b"AwsWafIntegration",
    b"/_sec/cp_challenge/",
    b"hcaptcha.com/1/api.js",
    b"recaptcha/api.js",
    b"challenges.cloudflare.com/turnstile",
)
_WALL = re.compile(
    r"just a moment|checking (?:your browser|if the site connection is secure)"
    r"|enable javascript and cookies|verify (?:that )?you are (?:a )?human|are you a robot"
    r"|unusual traffic from your|complete the captcha|ddos protection by|press & hold to confirm"
    r"|before you continue to|bitte bestätigen sie, dass sie kein roboter",
    re.I,
)
_MISSING = re.compile(
    r"(?:error\s*)?404\b.{0,60}"
    r"|(?:(?:the|this|that)\s+)?page\s+(?:was\s+|could\s+|can)?(?:not\s+be\s+found|not\s+found"
    r"|does(?:n.t| not)\s+exist)\b.{0,60}"
    r"|not found|seite nicht gefunden.{0,60}|page introuvable.{0,60}|页面不存在|找不到页面",
    re.I,
)


def failure_of(response: Response) -> SearchFetchError | None:
    """The error that an error status stands for, None for a page."""
    if response.status < 400 and response.status != 304:
        return None
    if is_challenge(response):
        return ContentError(
            "challenge_page",
            "a bot wall was returned instead of the page",
            details={"status": response.status},
        )
    missing = response.status in (404, 410)
    return UpstreamError(
        "upstream_http",
        f"the page answered HTTP {response.status}",
        http_status=404 if missing else 502,
        retryable=response.status in (408, 425, 429, 500, 502, 503, 504),
        details={"status": response.status},
    )


def is_challenge(response: Response) -> bool:
    """Whether the answer is a bot wall by the marks that such walls carry."""
    if (
        response.header("cf-mitigated") == "challenge"
        or response.header("x-datadome") == "protected"
    ):
        return response.status >= 400 or response.header("cf-mitigated") == "challenge"
    if response.status not in _WALL_STATUSES:
        return False
    head = response.body[:_MARK_WINDOW]
    return any(mark in head for mark in _WALL_MARKS)


def refuse_what_is_no_page(response: Response, extraction: Extraction) -> None:
    """Raise for a wall (challenge_page) or a soft 404 (upstream_http) that came as HTTP 200."""
    short = len(extraction.content) < _WALL_CHARS
    if is_challenge(response) or (
        short and _WALL.search(f"{extraction.title or ''}\n{extraction.content}")
    ):
        raise ContentError(
            "challenge_page", "a bot or consent wall was returned instead of the page"
        )
    title = " ".join((extraction.title or "").split())
    if len(extraction.content) < _SOFT_404_CHARS and _MISSING.fullmatch(_first_part(title)):
        raise UpstreamError(
            "upstream_http",
            f"the page answered HTTP {response.status}, but says that it does not exist",
            http_status=404,
            retryable=False,
            details={"status": response.status, "soft_404": True},
        )


def _first_part(title: str) -> str:
    """The title without the site's name: "Page not found | Example" -> "Page not found"."""
    return re.split(r"\s+[|–—·-]\s+", title, maxsplit=1)[0]  # noqa: RUF001
