"""What the REST service adds to a search in the library: side by side, one process, loopback.

    python benches/bench_service.py [--documents 20000] [--seconds 20]

Each query goes in turn to the library, to POST /v1/search with a key and the ledger on disk, and to
GET /healthz (the floor: one request without work), over one kept connection. CPU time of the whole
process, client included, is what a busy machine cannot change; wall time is printed beside it.
Goal: service p50 - library p50 <= 3 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn

from deepinfer_search_fetch import AsyncSearchFetch, Config, SearchRequest
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.service.app import create_app
from deepinfer_search_fetch.service.auth import KeyStore
from deepinfer_search_fetch.service.metering import Ledger
from deepinfer_search_fetch.service.run import server_config
from deepinfer_search_fetch.service.settings import ServiceSettings

GOAL_MS = 3.0


def vocabulary(choose: random.Random) -> list[str]:
    """Words as different from one another as those of a language."""
    syllables = [c + v + e for c in "bdfgklmnprst" for v in "aeiou" for e in ("", "n", "r", "s")]
    return ["".join(choose.choices(syllables, k=choose.randrange(2, 5))) for _ in range(5000)]


def text(count: int, vocabulary: list[str], choose: random.Random) -> str:
    """Text whose words are as unevenly common as those of a language."""
    ranks = (int(choose.paretovariate(0.9)) for _ in range(count))
    return " ".join(vocabulary[rank % len(vocabulary)] for rank in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    choose = random.Random(1)
    known = vocabulary(choose)
    home = Path(tempfile.mkdtemp(prefix="bench-service-"))
    client = AsyncSearchFetch(Config(home=home, extract_workers=0))
    client.backend.index(
        IndexedPage(
            f"https://h{n % 997}.example/{n}",
            text(6, known, choose),
            text(160, known, choose),
            "2026-01-01",
        )
        for n in range(options.documents)
    )
    client.backend.commit()
    keys, ledger = KeyStore(home / "keys.sqlite3"), Ledger(home / "ledger.sqlite3")
    secret, _ = keys.create("bench")
    settings = ServiceSettings(rate_per_second=1e6, rate_burst=10**6)
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    server = uvicorn.Server(server_config(create_app(client, ledger, keys, settings), settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}

    def over_http(method: str, path: str, body: bytes | None = None) -> None:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        reply.read()
        assert reply.status == 200, reply.status

    def measured(name: str, work: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        cpu_ms[name].append(1000 * (time.process_time() - cpu))
        wall_ms[name].append(1000 * (time.perf_counter() - wall))

    names = ("library", "service", "healthz")
    cpu_ms: dict[str, list[float]] = {name: [] for name in names}
    wall_ms: dict[str, list[float]] = {name: [] for name in names}
    with asyncio.Runner() as runner:

        def in_library(query: str) -> None:
            response = runner.run(client.search(SearchRequest(query=query)))
            json.dumps(response.model_dump(mode="json"))

        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            query = " ".join(
                f"w{choose.randrange(50, 4000)}" for _ in range(choose.randrange(1, 4))
            )
            body = json.dumps({"query": query}).encode()
            measured("library", lambda q=query: in_library(q))
            measured("service", lambda b=body: over_http("POST", "/v1/search", b))
            measured("healthz", lambda: over_http("GET", "/healthz"))
    connection.close()
    server.should_exit = True
    thread.join()
    rows = sum(int(r["quantity"]) for r in ledger.usage())
    print(f"{options.documents} documents, {len(cpu_ms['library'])} queries, {rows} ledger rows")
    for name in names:
        cpu, wall = statistics.median(cpu_ms[name]), statistics.median(wall_ms[name])
        p99 = statistics.quantiles(cpu_ms[name], n=100)[98]
        print(f"{name:8} CPU p50 {cpu:7.2f} ms   p99 {p99:7.2f} ms   wall p50 {wall:7.2f} ms")
    for kind, taken in (("CPU", cpu_ms), ("wall", wall_ms)):
        library, service = statistics.median(taken["library"]), statistics.median(taken["service"])
        print(
            f"overhead p50, {kind}: {service - library:.2f} ms (goal <= {GOAL_MS:g} ms); "
            f"service / library {service / library:.2f}"
        )


if __name__ == "__main__":
    main()
