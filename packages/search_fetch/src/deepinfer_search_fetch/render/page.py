"""One page in the browser: what it may load, when it has come to rest, what it says then."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import Coroutine
from typing import Any

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import (
    InvalidRequestError,
    RefusedError,
    SearchFetchError,
    UpstreamError,
)
from deepinfer_search_fetch.extract.scripted import MAX_TEXT_CHARS
from deepinfer_search_fetch.render.base import Rendered, RenderJob
from deepinfer_search_fetch.render.cdp import BrowserLostError, Connection
from deepinfer_search_fetch.render.snapshot import flatten

MAX_NAVIGATIONS = 5
IDLE_SECONDS = 0.5
STABLE_SECONDS = 0.25
_TICK_SECONDS = 0.05
_BLOCKED_TYPES = frozenset({"Image", "Media", "Font", "TextTrack", "Ping", "Prefetch", "Manifest"})
# A frame's and a worker's own requests reach the proxy too; these doors have no use here at all.
_NO_SIDE_DOORS = """
for (const name of ["RTCPeerConnection", "webkitRTCPeerConnection", "RTCDataChannel",
                    "WebTransport", "SharedWorker"]) { try { delete globalThis[name]; } catch {} }
try { Object.defineProperty(Navigator.prototype, "serviceWorker", {value: undefined}); } catch {}
"""
_SIZE = (
    "[document.getElementsByTagName('*').length,"
    " document.body ? document.body.innerText.length : 0]"
)


class PageSession:
    """Drives one attached target. `run` once, then `close`."""

    def __init__(
        self,
        connection: Connection,
        session: str,
        main_frame: str,
        job: RenderJob,
        user_agent: str,
    ) -> None:
        self._connection = connection
        self._session = session
        self._job = job
        self._user_agent = user_agent
        self._main_frame = main_frame
        self._loaded = False
        self._in_flight: set[str] = set()
        self._quiet_since = time.monotonic()
        self._served = False
        self._navigations = 0
        self._status = 200
        self._here = job.url
        self._refused: SearchFetchError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> Rendered:
        """Load, wait, read. Raises SearchFetchError, BrowserLostError."""
        deadline = time.monotonic() + self._job.seconds
        self._connection.on_events(self._session, self._event)
        await self._prepare()
        answer = await self._call("Page.navigate", {"url": str(self._job.url)})
        if answer.get("errorText") and self._refused is None:
            raise UpstreamError("internal", f"the browser cannot show it: {answer['errorText']}")
        warnings: list[str] = [] if await self._rest(deadline) else ["render_time_limit"]
        if self._refused is not None:
            raise self._refused
        committed = await self._committed()
        snapshot = await self._call("DOMSnapshot.captureSnapshot", {"computedStyles": []})
        html, cut = flatten(snapshot)
        if cut:
            warnings.append("too_many_nodes")
        return Rendered(html, committed, self._status, tuple(warnings))

    def close(self) -> None:
        self._connection.on_events(self._session, None)
        for task in self._tasks:
            task.cancel()

    async def _call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return await self._connection.call(method, params, self._session)

    async def _prepare(self) -> None:
        agent = {"userAgent": self._user_agent}
        if self._job.accept_language:
            agent["acceptLanguage"] = self._job.accept_language
        await self._call("Network.enable")
        await self._call("Network.setBypassServiceWorker", {"bypass": True})
        await self._call("Emulation.setUserAgentOverride", agent)
        await self._call("Page.enable")
        await self._call("Page.addScriptToEvaluateOnNewDocument", {"source": _NO_SIDE_DOORS})
        await self._call("Fetch.enable", {"patterns": [{"urlPattern": "*"}]})

    def _event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Fetch.requestPaused":
            self._spawn(params)
        elif method == "Network.requestWillBeSent":
            self._in_flight.add(params["requestId"])
            self._quiet_since = time.monotonic()
        elif method in ("Network.loadingFinished", "Network.loadingFailed"):
            self._in_flight.discard(params["requestId"])
            self._quiet_since = time.monotonic()
        elif method == "Network.responseReceived":
            if params.get("type") == "Document" and params.get("frameId") == self._main_frame:
                self._status = int(params["response"]["status"])
        elif method == "Page.domContentEventFired":
            self._loaded = True
            self._quiet_since = time.monotonic()
        elif method == "Page.javascriptDialogOpening":
            self._run(self._call("Page.handleJavaScriptDialog", {"accept": False}))

    def _spawn(self, params: dict[str, Any]) -> None:
        self._run(self._decide(params))

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        async def quiet() -> None:
            # The request or the page may be gone already; `run` notices a lost browser itself.
            with contextlib.suppress(SearchFetchError, BrowserLostError):
                await work

        task = asyncio.create_task(quiet())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _decide(self, params: dict[str, Any]) -> None:
        """Let one request through, answer it, or block it."""
        request = params["requestId"]
        kind = params["resourceType"]
        if kind == "Document" and params["frameId"] == self._main_frame:
            await self._navigation(request, params["request"])
        elif kind in _BLOCKED_TYPES or (kind == "Document" and not self._same_origin(params)):
            await self._call(
                "Fetch.failRequest", {"requestId": request, "errorReason": "BlockedByClient"}
            )
        else:
            await self._call("Fetch.continueRequest", {"requestId": request})

    async def _navigation(self, request: str, details: dict[str, Any]) -> None:
        """The main document: first the text we hold, later ones only with the gate's consent."""
        if not self._served:
            self._served = True
            await self._call(
                "Fetch.fulfillRequest",
                {
                    "requestId": request,
                    "responseCode": 200,
                    "responseHeaders": [
                        {"name": "Content-Type", "value": "text/html; charset=utf-8"}
                    ],
                    "body": base64.b64encode(
                        self._job.html.encode("utf-8", "replace")
                    ).decode("ascii"),
                },
            )  # fmt: skip
            return
        self._navigations += 1
        try:
            if details["method"] != "GET":
                raise RefusedError("forbidden", "the page tries to send a form by itself")
            if self._navigations > MAX_NAVIGATIONS:
                raise UpstreamError("too_many_redirects", "the page navigates again and again")
            target = urls.parse(details["url"])
            await self._job.gate(target)
        except SearchFetchError as error:
            self._refused = error
            await self._call(
                "Fetch.failRequest", {"requestId": request, "errorReason": "BlockedByClient"}
            )
            return
        self._loaded = False
        self._here = target
        await self._call("Fetch.continueRequest", {"requestId": request})

    def _same_origin(self, params: dict[str, Any]) -> bool:
        try:
            return urls.parse(params["request"]["url"]).origin == self._here.origin
        except SearchFetchError:
            return False

    async def _rest(self, deadline: float) -> bool:
        """Wait until the page is at rest; False when the limit came first."""
        wait_for = self._job.wait_for
        sizes: list[tuple[float, list[int]]] = []
        started = time.monotonic()
        while (now := time.monotonic()) < deadline:
            await asyncio.sleep(_TICK_SECONDS)
            if self._refused is not None:
                return True
            if not self._loaded:
                continue
            if isinstance(wait_for, int):
                if now - started >= wait_for / 1000:
                    return True
            elif wait_for is not None:
                if await self._matches(wait_for):
                    return True
            elif not self._in_flight and now - self._quiet_since >= IDLE_SECONDS:
                return True
            elif not sizes or now - sizes[-1][0] >= STABLE_SECONDS:
                sizes.append((now, await self._evaluate(_SIZE)))
                last = [size for _, size in sizes[-3:]]
                enough = bool(last[-1]) and last[-1][1] >= MAX_TEXT_CHARS
                if enough and len(last) == 3 and last[0] == last[1] == last[2]:
                    return True
        return False

    async def _matches(self, selector: str) -> bool:
        return bool(await self._evaluate(f"!!document.querySelector({json.dumps(selector)})"))

    async def _evaluate(self, expression: str) -> Any:
        answer = await self._call(
            "Runtime.evaluate",
            {"expression": expression, "returnByValue": True, "timeout": 1000},
        )
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"].get("exception", {}).get("description", "")
            if "not a valid selector" in thrown:
                raise InvalidRequestError("invalid_argument", "wait_for is not a valid selector")
            return None
        return answer["result"].get("value")

    async def _committed(self) -> urls.Url:
        """The URL the page ended at, checked once more."""
        tree = await self._call("Page.getFrameTree")
        frame = tree["frameTree"]["frame"]
        if frame.get("unreachableUrl"):
            raise UpstreamError("connect_failure", "the page went to a URL that does not answer")
        committed = urls.parse(frame["url"])
        if committed.origin != self._here.origin:
            await self._job.gate(committed)
        return committed
