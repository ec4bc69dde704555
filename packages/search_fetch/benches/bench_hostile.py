"""What a well-behaved client waits while ten hostile ones do their worst, beside the same alone.

    python benches/bench_hostile.py [--seconds 40] [--each SECONDS] [--json FILE]
    python benches/bench_hostile.py --floor

A real `search-fetch serve` with keys in a process of its own, its limits those that ship; the only
stand-in is the name server (names end in .test, those in .slow.test answer after twelve seconds).
The well-behaved client asks four times a second: a search, a page nobody has read yet, a page from
the cache, a list of tools. It goes first alone, then beside all ten, then alone again; --each also
runs every hostile client by itself. Exits with 1 when a request of it failed or its p99 beside them
is more than twice its p99 alone.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import http.server
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench_service import text as words
from bench_service import vocabulary
from hostile_clients import ATTACKS

from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.service.auth import KeyStore

SITE = "127.0.0.2"
RATE = 4.0
GOAL = 2.0
TEXT = "Voles live in the grass of the meadow, and the kestrel hovers above it. "


def small_page(n: int) -> bytes:
    parts = "".join(f"<h2>Part {i}</h2><p>{n}.{i} {TEXT * 4}" for i in range(12))
    menu = "<nav>" + "<a href=/a>Home</a> " * 20 + "</nav>"
    return f"<title>Page {n}</title>{menu}<article><h1>Voles</h1>{parts}</article>".encode()


BODIES: dict[str, bytes] = {
    "/long": b"<title>Long</title>" + b"".join(
        f"<p>{i} {TEXT * 3}</p>".encode() for i in range(3000)
    ),
    "/huge": b"<title>Huge</title>" + (f"<p>{TEXT * 20}</p>".encode() * 6500),
    "/marks": b"<p>" + "\u0f71\u0f72".encode() * 1_500_000,
    "/nested": b"<div>" * 90_000 + b"<p>" + TEXT.encode() * 40,
    "/table": b"<table>" + b"<tr><td colspan=1000 rowspan=1000>x" * 5000,
    "/sheet": ("<style>" + ":not(.a):nth-child(2n) ~ p > b{display:none}" * 2000 + "</style>"
               + "<p>a" * 2000).encode(),
    "/gzip": gzip.compress(b"<p>" + b"a " * 15_000_000),
}  # fmt: skip


class SiteHandler(http.server.BaseHTTPRequestHandler):
    """The public internet of the bench."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.close_connection = True
        if path in ("/endless", "/circle"):
            n = int(query or 0)
            onward = f"/endless?{n + 1}" if path == "/endless" else "/circle?0"
            self.send_response(302)
            self.send_header("Location", onward)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        known = path in BODIES or path == "/small"
        body = BODIES.get(path) or (small_page(int(query or 0)) if known else b"")
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        if path == "/gzip":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Site(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that leave


def run_site(*, hostile: bool) -> None:
    server = Site((SITE, 0), SiteHandler)
    print(server.server_port, flush=True)
    if hostile:
        os.nice(19)  # the internet is elsewhere, and does not take the service's processors
    server.serve_forever()


def run_service(arguments: list[str]) -> None:
    """`search-fetch serve` behind a name server of ours."""
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else str(host)
        if name.endswith(".slow.test"):
            time.sleep(12)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        if name.endswith(".test"):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (SITE, 0))]
        return real(host, *rest, **more)

    socket.getaddrinfo = look_up  # type: ignore[assignment]
    from deepinfer_search_fetch.cli import main

    sys.argv = ["search-fetch", "serve", *arguments]
    main()


class WellBehaved:
    """A client that asks a few times a second and notes how long it waited."""

    def __init__(self, service: int, site: int, key: str) -> None:
        self._service, self._site = service, site
        self._headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        }
        self._pages = 0
        self._choose = random.Random(2)
        self._known = vocabulary(random.Random(1))
        self.failures: list[str] = []

    def ask(self, path: str, body: Any) -> float:
        data = json.dumps(body)
        started = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self._service, timeout=60)
        try:
            connection.request("POST", path, data, self._headers)
            reply = connection.getresponse()
            text = reply.read()
            if reply.status != 200:
                self.failures.append(f"{path}: {reply.status} {text[:200]!r}")
        except OSError as error:
            self.failures.append(f"{path}: {error}")
        finally:
            connection.close()
        return 1000 * (time.perf_counter() - started)

    def page(self, n: int) -> str:
        return f"http://good{n}.test:{self._site}/small?{n}"

    def run(self, seconds: float) -> dict[str, list[float]]:
        """Milliseconds by kind of request."""
        times: dict[str, list[float]] = {}
        listed = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        end = time.monotonic() + seconds
        due = time.monotonic()
        while due < end:
            self._pages += 1
            query = " ".join(self._choose.choices(self._known[20:2000], k=2))
            for kind, path, body in (
                ("search", "/v1/search", {"query": query}),
                ("fetch", "/v1/fetch", {"url": self.page(self._pages)}),
                ("fetch, cached", "/v1/fetch", {"url": self.page(self._pages)}),
                ("mcp", "/mcp", listed),
            ):
                time.sleep(max(0.0, due - time.monotonic()))
                due += 1 / RATE
                times.setdefault(kind, []).append(self.ask(path, body))
        return times


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    rows = {**times, "all": [t for values in times.values() for t in values]}
    return {
        kind: {
            "requests": len(values),
            "p50": round(statistics.median(values), 1),
            "p99": round(quantile(values, 0.99), 1),
            "max": round(max(values), 1),
        }
        for kind, values in rows.items()
    }


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_seconds(pid: int) -> float:
    """How long the main thread of a process was ready to go on and had no processor."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


class Attackers:
    """The hostile clients, while the block runs."""

    def __init__(self, service: int, site: int, keys: dict[str, list[str]]) -> None:
        pairs = [f"{name}={key}" for name, own in keys.items() for key in own]
        script = str(Path(__file__).with_name("hostile_clients.py"))
        self._command = [sys.executable, script, str(service), str(site), *pairs]
        self.sent: dict[str, int] = {}

    def __enter__(self) -> Attackers:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        time.sleep(2)  # until they are at full strength
        return self

    def __exit__(self, *_: object) -> None:
        out, _err = self._process.communicate("", timeout=60)
        self.sent = json.loads(out)


def prepare(home: Path, ports: tuple[int, ...]) -> tuple[str, dict[str, list[str]]]:
    """An index of 2,000 pages, settings, and a key for everyone."""
    home.mkdir(parents=True)
    (home / "config.toml").write_text(
        f'allow_cidrs = ["{SITE}/32"]\nports = {list(ports)}\n'
        "host_requests_per_second = 1000.0\nhost_burst = 1000\n"
    )
    backend = TantivyBackend(home / "index")
    choose = random.Random(1)
    known = vocabulary(choose)
    backend.index(
        IndexedPage(
            f"https://h{n % 997}.example/{n}",
            words(6, known, choose),
            words(160, known, choose),
            "2026-01-01",
        )
        for n in range(5000)
    )
    backend.commit()
    store = KeyStore(home / "keys.sqlite3")
    good = store.create("good")[0]
    keys = {
        name: [store.create(name)[0] for _ in range(10 if name == "many_keys" else 1)]
        for name in ATTACKS
    }
    store.close()
    return good, keys


def show(title: str, rows: dict[str, dict[str, float]], base: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    print(f"  {'':16}{'requests':>9}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'p99 / alone':>13}")
    for kind, row in rows.items():
        ratio = row["p99"] / base[kind]["p99"]
        print(
            f"  {kind:16}{row['requests']:9.0f}{row['p50']:9.1f}{row['p99']:9.1f}"
            f"{row['max']:9.1f}{ratio:13.2f}"
        )


def measure(options: argparse.Namespace, home: Path, site: int, theirs: int) -> dict[str, Any]:
    good, keys = prepare(home, (site, theirs))
    service = subprocess.Popen(
        [sys.executable, __file__, "--serve", "--port", "0", "--home", str(home)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert service.stderr is not None
    port = 0
    for line in service.stderr:
        if said := re.search(r"serves on http://127\.0\.0\.1:(\d+)/", line):
            port = int(said.group(1))
            break
    threading.Thread(target=lambda: [None for _ in service.stderr or ()], daemon=True).start()
    client = WellBehaved(port, site, good)
    try:
        client.run(6)  # warm
        client.failures.clear()
        found: dict[str, Any] = {"alone": summary(client.run(options.seconds))}
        show("alone", found["alone"], found["alone"])
        for name, own in keys.items() if options.each else ():
            with Attackers(port, theirs, {name: own}) as one:
                found[name] = summary(client.run(options.each))
            show(f"beside {name} ({sum(one.sent.values())} requests)", found[name], found["alone"])
        with Attackers(port, theirs, keys) as ten:
            spent, began = cpu_seconds(service.pid), time.monotonic()
            waited = waited_seconds(service.pid)
            found["beside"] = summary(client.run(options.seconds))
            share = (cpu_seconds(service.pid) - spent) / (time.monotonic() - began)
            found["service cores"] = round(share, 2)
            waited = (waited_seconds(service.pid) - waited) / (time.monotonic() - began)
            found["event loop waits for a processor"] = round(waited, 3)
        found["hostile requests"] = ten.sent
        show("beside all ten", found["beside"], found["alone"])
        print(
            f"  the service's own process used {found['service cores']} of a core; its event loop"
            f" waited for one {found['event loop waits for a processor']:.0%} of the time"
        )
        print("  their requests:", ", ".join(f"{k} {v}" for k, v in sorted(ten.sent.items())))
        time.sleep(3)
        found["after"] = summary(client.run(options.seconds / 2))
        show("alone again", found["after"], found["alone"])
        found["failures"] = client.failures
        status = Path(f"/proc/{service.pid}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+)", status)
        found["service peak MiB"] = int(peak.group(1)) // 1024 if peak else 0
    finally:
        service.kill()
        service.wait()
    return found


def floor(seconds: float = 10.0) -> None:
    """What any process waits for 20 ms of its own work, four times a second: alone, and beside ten
    that never stop, at its own priority and at the lowest."""

    def worked() -> float:
        started = time.perf_counter()
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return 1000 * (time.perf_counter() - started)

    def p99() -> float:
        times = []
        for _ in range(int(seconds * RATE)):
            time.sleep(1 / RATE)
            times.append(worked())
        return quantile(times, 0.99)

    alone = p99()
    print(f"20 ms of work, p99: alone {alone:.1f} ms")
    for nice in (0, 19):
        spin = [sys.executable, "-c", f"import os; os.nice({nice})\nwhile True: pass"]
        others = [subprocess.Popen(spin) for _ in range(10)]
        time.sleep(1)
        beside = p99()
        for other in others:
            other.kill()
            other.wait()
        print(f"  beside ten at nice {nice}: {beside:.1f} ms, {beside / alone:.2f} times")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        run_service(sys.argv[2:])
        return
    if sys.argv[1:2] == ["--site"]:
        run_site(hostile=sys.argv[2:] == ["hostile"])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--each", type=float, default=0.0)
    parser.add_argument("--floor", action="store_true", help="what the machine itself allows")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.floor:
        floor()
        return
    sites = [
        subprocess.Popen(
            [sys.executable, __file__, "--site", *whose], stdout=subprocess.PIPE, text=True
        )
        for whose in ((), ("hostile",))
    ]
    try:
        ports = [int(site.stdout.readline()) for site in sites if site.stdout is not None]
        with tempfile.TemporaryDirectory() as folder:
            found = measure(options, Path(folder) / "home", *ports)
    finally:
        for site in sites:
            site.kill()
            site.wait()
    ratio = found["beside"]["all"]["p99"] / found["alone"]["all"]["p99"]
    print(
        f"\np99 alone {found['alone']['all']['p99']} ms, beside ten hostile clients "
        f"{found['beside']['all']['p99']} ms: {ratio:.2f} times (goal at most {GOAL:g}); "
        f"{len(found['failures'])} of its requests failed; the service's own process had at most "
        f"{found['service peak MiB']} MiB"
    )
    for failure in found["failures"][:10]:
        print("  failed:", failure)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if found["failures"] or ratio > GOAL:
        sys.exit(1)


if __name__ == "__main__":
    main()
