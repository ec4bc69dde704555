"""System Chromium, headless, sandboxed, one process tree a worker, killed as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import tempfile
import time
from pathlib import Path

from deepinfer_search_fetch.config import RENDER_USER_VARIABLE, Config
from deepinfer_search_fetch.errors import ContentError, LimitError, SearchFetchError, UpstreamError
from deepinfer_search_fetch.net.dial import Dialer
from deepinfer_search_fetch.render.base import Rendered, RenderJob
from deepinfer_search_fetch.render.cdp import MAX_MESSAGE_BYTES, BrowserLostError, Connection
from deepinfer_search_fetch.render.egress_proxy import EgressProxy
from deepinfer_search_fetch.render.page import PageSession

PAGES_PER_BROWSER = 50
_START_SECONDS = 20.0
_CLOSE_SECONDS = 2.0
_GRACE_SECONDS = 3.0
_WATCH_SECONDS = 0.25
_KILL_POLL_SECONDS = 0.01
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
# Debian's /usr/bin/chromium is a script that adds flags of its own.
_DEBIAN_BINARY = Path("/usr/lib/chromium/chromium")
# The pipes of the DevTools protocol are descriptors 3 and 4 of the browser.
_WIRE_PIPES = 'exec 3<&0 4>&1 </dev/null >/dev/null; exec "$@"'
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-pings",
    "--mute-audio",
    "--password-store=basic",
    "--use-mock-keychain",
    "--window-size=1280,2400",
    "--js-flags=--max-old-space-size=512",
    "--block-new-web-contents",
    "--blink-settings=imagesEnabled=false",
    # Nothing may leave except through the proxy: no other protocol, no warm-up, no updates. The
    # browser itself gets a proxy that does not exist; each page's context names the real one.
    "--proxy-server=http://127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-quic",
    "--dns-prefetch-disable",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-client-side-phishing-detection",
    "--disable-breakpad",
    "--disable-extensions",
    "--disable-notifications",
    "--disable-gpu",
    "--disable-3d-apis",
    "--disable-dev-shm-usage",
    "--disable-file-system",
    "--disable-features=HttpsUpgrades,HttpsFirstBalancedModeAutoEnable,MediaRouter,OptimizationHints,Translate,Prerender2,DialMediaRouteProvider,"
    "AutofillServerCommunication,InterestFeedContentSuggestions,CertificateTransparencyComponentUpdater",
)


def find_chromium(configured: Path | None) -> Path | None:
    """The browser to run: the operator's choice, else the first known name on PATH."""
    if configured is not None:
        return configured if os.access(configured, os.X_OK) else None
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        return None
    return _DEBIAN_BINARY if _DEBIAN_BINARY.exists() else Path(found)


class ChromiumRenderer:
    """Implements `Renderer` with `config.render_workers` browsers, started on first use."""

    def __init__(self, config: Config, dialer: Dialer) -> None:
        self._config = config
        self._dialer = dialer
        self._turn = asyncio.Semaphore(config.render_workers)
        self._idle: list[_Browser] = []

    def problem(self) -> str | None:
        if self._config.render_workers == 0:
            return "the operator switched rendering off (render_workers=0)"
        if find_chromium(self._config.chromium) is None:
            return "no Chromium found; install one (Debian: chromium) or set its path"
        if os.geteuid() == 0 and self._config.render_user is None:
            return (
                f"a browser does not run as root; set render_user (or {RENDER_USER_VARIABLE}) "
                "to an unprivileged account, for example nobody"
            )
        if self._config.render_user is not None:
            try:
                user = pwd.getpwnam(self._config.render_user)
            except KeyError:
                return f"render_user {self._config.render_user!r} is not an account of this machine"
            if user.pw_uid == 0:
                return "render_user must not be root"
            if os.geteuid() not in (0, user.pw_uid):
                return "only root can run the browser as another user"
        return None

    async def render(self, job: RenderJob) -> Rendered:
        problem = self.problem()
        if problem is not None:
            raise ContentError("feature_unavailable", f"rendering is not available: {problem}")
        async with self._turn:
            browser = self._idle.pop() if self._idle else _Browser(self._config, self._dialer)
            try:
                return await browser.render(job)
            finally:
                if browser.clean and browser.pages < PAGES_PER_BROWSER:
                    self._idle.append(browser)
                else:
                    # Its page may still be running: the whole process tree dies with it.
                    await asyncio.shield(browser.kill())

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().kill()


class _Browser:
    """One Chromium with its proxy, its profile folder and its memory watch."""

    def __init__(self, config: Config, dialer: Dialer) -> None:
        self._config = config
        self._proxy = EgressProxy(dialer, config.limits, config.render_bytes)
        self._process: asyncio.subprocess.Process | None = None
        self._connection: Connection | None = None
        self._folder: Path | None = None
        self.pages = 0
        self.clean = False

    async def render(self, job: RenderJob) -> Rendered:
        """One page in a context of its own; `clean` tells whether that context is gone again."""
        self.pages += 1
        self.clean = False
        work = asyncio.create_task(self._render(job))
        watch = asyncio.create_task(self._outgrown())
        try:
            async with asyncio.timeout(job.seconds + _GRACE_SECONDS):
                await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise LimitError(
                        "response_too_large",
                        f"the page used more than {self._config.render_memory_bytes} bytes"
                        " of memory while it was rendered",
                    )
                return work.result()
        except TimeoutError:
            raise UpstreamError("timeout", "the page did not come to rest in time") from None
        except BrowserLostError:
            raise UpstreamError("internal", "the browser died while it rendered the page") from None
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _render(self, job: RenderJob) -> Rendered:
        connection = self._connection or await self._start()
        self._proxy.begin()
        created = await connection.call(
            "Target.createBrowserContext",
            {
                "proxyServer": f"http://127.0.0.1:{self._proxy.port}",
                "proxyBypassList": "<-loopback>",
            },
        )
        context = created["browserContextId"]
        await connection.call(
            "Browser.setDownloadBehavior", {"behavior": "deny", "browserContextId": context}
        )
        target = await connection.call(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )
        attached = await connection.call(
            "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
        )
        # A target's main frame has the target's own id.
        session = PageSession(
            connection,
            attached["sessionId"],
            target["targetId"],
            job,
            self._config.user_agent,
        )
        try:
            rendered = await session.run()
        except SearchFetchError as error:
            await self._dispose(connection, session, context)
            if error.code == "connect_failure" and self._proxy.refused:
                raise self._proxy.refused[-1] from None  # why the page's own navigation failed
            raise
        await self._dispose(connection, session, context)
        warnings = rendered.warnings
        if self._proxy.refused:
            warnings += (f"render_requests_refused:{len(self._proxy.refused)}",)
        if self._proxy.exhausted:
            warnings += ("render_byte_limit",)
        return Rendered(rendered.html, rendered.url, rendered.status, warnings)

    async def _dispose(self, connection: Connection, session: PageSession, context: str) -> None:
        session.close()
        async with asyncio.timeout(_CLOSE_SECONDS):
            await connection.call("Target.disposeBrowserContext", {"browserContextId": context})
        self.clean = True

    async def _start(self) -> Connection:
        binary = find_chromium(self._config.chromium)
        assert binary is not None, "problem() was asked first"
        await self._proxy.start()
        folder = self._folder = Path(tempfile.mkdtemp(prefix="search-fetch-browser-"))
        user = pwd.getpwnam(self._config.render_user) if self._config.render_user else None
        other = user if user is not None and user.pw_uid != os.geteuid() else None
        if other is not None:
            os.chown(folder, other.pw_uid, other.pw_gid)
        sandbox = () if self._config.render_sandbox else ("--no-sandbox",)
        log = folder / "browser.log"
        with log.open("wb") as stderr:
            self._process = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-c",
                _WIRE_PIPES,
                "sh",
                str(binary),
                *_FLAGS,
                *sandbox,
                f"--user-data-dir={folder / 'profile'}",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=MAX_MESSAGE_BYTES,
                cwd=folder,
                # Nothing of the service's environment: neither secrets nor proxies.
                env={"HOME": str(folder), "TMPDIR": str(folder), "PATH": "/usr/bin:/bin"},
                start_new_session=True,
                user=None if other is None else other.pw_uid,
                group=None if other is None else other.pw_gid,
                extra_groups=None if other is None else [],
            )
        stdout, stdin = self._process.stdout, self._process.stdin
        assert stdout is not None
        assert stdin is not None
        connection = self._connection = Connection(stdout, stdin)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await connection.call("Browser.getVersion")
        except (BrowserLostError, TimeoutError):
            text = log.read_text("utf-8", "replace")
            hint = (
                "its sandbox cannot start here (user namespaces are off?); "
                "the operator may set render_sandbox=false"
                if "sandbox" in text
                else text.strip().splitlines()[-1:] or "no message"
            )
            raise ContentError(
                "feature_unavailable", f"the browser does not start: {hint}"
            ) from None
        return connection

    async def _outgrown(self) -> None:
        """Returns once the process tree holds more private memory than is allowed."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if self._process is not None:
                used = await asyncio.to_thread(group_memory_bytes, self._process.pid)
                if used > self._config.render_memory_bytes:
                    return

    async def kill(self) -> None:
        """End every process of the tree and remove the profile; safe to call twice."""
        if self._process is not None:
            group = self._process.pid
            deadline = time.monotonic() + _CLOSE_SECONDS
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            await self._process.wait()
            # Members are nobody's children here once their parent is dead: only looking helps.
            while group_members(group) and time.monotonic() < deadline:
                await asyncio.sleep(_KILL_POLL_SECONDS)
            self._process = None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        await self._proxy.close()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, True)
            self._folder = None


def group_members(group: int) -> list[Path]:
    """The /proc folders of a process group's living members (Linux)."""
    members: list[Path] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if fields[0] not in "ZX" and int(fields[2]) == group:
            members.append(folder)
    return members


def group_memory_bytes(group: int) -> int:
    """Private memory of all processes of a group; shared pages are not counted."""
    total = 0
    for folder in group_members(group):
        try:
            lines = (folder / "status").read_text("ascii", "replace").splitlines()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssSh"))
        )
    return total
