"""The object-storage tier over HTTP against moto, a mock of S3, behind a proxy that fails by plan:
`nox -s s3`."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deepinfer_kvtier.base.config import DEFAULT_CLASSES
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.values import Status
from deepinfer_kvtier.remote.tiers.objects import (
    Absent,
    Exists,
    S3TierConfig,
    Unavailable,
    open_objects,
)
from deepinfer_kvtier.remote.tiers.s3 import S3Tier
from deepinfer_kvtier.remote.tiers.s3_gc import S3Collector
from deepinfer_kvtier.testing import ManualClock

moto = pytest.importorskip("moto.server", reason="needs moto[server]: nox -s s3")
pytest.importorskip("obstore")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


class Proxy:
    """Passes requests on; `plan(method, path)` names an effect or None."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.plan = lambda method, path: None
        self.seen: Counter[str] = Counter()
        self.released = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.seen[self.command] += 1
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                effect = proxy.plan(self.command, self.path)
                if effect == "hang":
                    proxy.released.wait(30)
                    self.close_connection = True
                    return
                if effect == "503":
                    self.answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
                    return
                connection = http.client.HTTPConnection(*upstream, timeout=30)
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                content = answer.read()
                headers = dict(answer.getheaders())
                connection.close()
                if effect == "answer lost":
                    self.close_connection = True
                    return
                if effect == "wrong bytes":
                    content = bytes(byte ^ 0x5A for byte in content)
                self.answer(answer.status, headers, content, cut=effect == "cut")

            def answer(self, status, headers, content, *, cut=False) -> None:
                self.send_response(status)
                dropped = ("transfer-encoding", "content-length", "connection", "date", "server")
                for name, value in headers.items():
                    if name.lower() not in dropped:
                        self.send_header(name, value)
                length = int(headers.get("Content-Length", 0)) if self.command == "HEAD" else None
                self.send_header("Content-Length", str(length or len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if cut else content)
                if cut:
                    self.close_connection = True

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815

            def log_message(self, *_args) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture(scope="module")
def upstream():
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    request = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
    yield host, port
    server.stop()


@pytest.fixture
def proxy(upstream):
    proxy = Proxy(upstream)
    yield proxy
    proxy.close()


@pytest.fixture
def open_tier(proxy, request):
    tiers = []

    def make(**changes):
        settings = {
            "url": f"s3://bucket/{abs(hash(request.node.name))}",
            "endpoint": proxy.url,
            "allow_http": True,
            "access_key_id": "test",
            "secret_access_key": "test",
            "timeout_s": 5.0,
            "max_retries": 0,
            **changes,
        }
        config = S3TierConfig.model_validate(settings)
        tier = S3Tier(
            config, open_objects(config), classes=DEFAULT_CLASSES, clock=ManualClock(time.time())
        )
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()


def test_two_machines_share_a_bucket(open_tier, make_record, read_back):
    one, two = open_tier(), open_tier()
    assert one.put_from([make_record(n) for n in range(40)]) == [Status.OK] * 40
    two.refresh()
    assert read_back(two, range(40))[1] == 40
    two.delete(0, 0, [make_record(3).digest])
    one.refresh()
    assert read_back(one, range(40))[1] == 39


def test_creation_is_granted_once(open_tier):
    objects = open_tier().objects
    objects.create("x", [b"first"])
    with pytest.raises(Exists):
        objects.create("x", [b"second"])
    assert objects.get("x") == b"first"
    with pytest.raises(Absent):
        objects.get("y")


def test_a_span_of_blocks_is_one_request(open_tier, proxy, make_record, read_back):
    tier = open_tier()
    tier.put_from([make_record(n) for n in range(64)])
    proxy.seen.clear()
    assert read_back(tier, range(64))[1] == 64
    assert proxy.seen == Counter(GET=1)


@pytest.mark.parametrize(
    ("effect", "status"),
    [
        ("503", Status.ERROR),
        ("hang", Status.ERROR),
        ("cut", Status.ERROR),
        ("answer lost", Status.ERROR),
        ("wrong bytes", Status.CORRUPT),
    ],
)
def test_trouble_while_reading_is_a_status_and_passes(
    open_tier, proxy, make_record, read_back, effect, status
):
    tier = open_tier()
    tier.put_from([make_record(0)])
    quick = open_tier(timeout_s=0.5)
    quick.refresh()
    proxy.plan = lambda method, path: effect if "/seg/" in path else None
    assert read_back(quick, [0]) == ([status], 0)
    proxy.plan = lambda method, path: None
    fresh = open_tier()
    fresh.refresh()
    assert read_back(fresh, [0])[1] == 1


def test_a_busy_store_is_asked_again(open_tier, proxy, make_record, read_back):
    tier = open_tier(max_retries=3)
    answers = iter(["503", "503"])
    proxy.plan = lambda method, path: next(answers, None) if "/seg/" in path else None
    assert tier.put_from([make_record(0)]) == [Status.OK]
    answers = iter(["503", "503"])
    assert read_back(tier, [0])[1] == 1


@pytest.mark.parametrize("effect", ["503", "answer lost"])
@pytest.mark.parametrize("where", ["/seg/", "/idx/", "/manifest/"])
def test_trouble_while_writing_loses_at_most_what_was_reported(
    open_tier, proxy, make_record, read_back, effect, where
):
    tier = open_tier()
    tier.put_from([make_record(0)])
    proxy.plan = lambda method, path: effect if method == "PUT" and where in path else None
    statuses = tier.put_from([make_record(1)])
    proxy.plan = lambda method, path: None
    reader = open_tier()
    reader.refresh()
    good = read_back(reader, [0, 1])[1]
    assert good == 2 or statuses == [Status.ERROR]
    assert read_back(reader, [0])[1] == 1
    assert tier.put_from([make_record(1)]) == [Status.OK]
    reader.refresh()
    assert read_back(reader, [0, 1])[1] == 2


def test_a_lost_answer_that_the_client_repeats_is_a_success(open_tier, proxy, make_record):
    tier = open_tier(max_retries=2)
    lost = iter(["answer lost"])
    proxy.plan = lambda method, path: (
        next(lost, None) if method == "PUT" and "/seg/" in path else None
    )
    assert tier.put_from([make_record(0)]) in ([Status.OK], [Status.ERROR])
    proxy.plan = lambda method, path: None
    assert tier.put_from([make_record(0)]) == [Status.OK]


def test_retention_deletes_objects(open_tier, make_record):
    tier = open_tier(grace_s=0)
    tier.put_from([make_record(n, cls="scratch") for n in range(3)])
    tier.clock.advance(3601)
    collector = S3Collector(tier)
    assert collector.collect().tombstoned == 1
    assert collector.collect().deleted == 1
    assert tier.objects.list("seg/") == []


def test_a_bucket_that_is_not_there_is_trouble_not_emptiness(open_tier, make_record):
    tier = open_tier(url="s3://nowhere/prefix")
    with pytest.raises(Unavailable):
        tier.refresh()
    assert tier.put_from([make_record(0)]) == [Status.ERROR]


def test_plain_http_needs_to_be_allowed(open_tier):
    tier = open_tier(allow_http=False)
    with pytest.raises((Unavailable, ConfigError)):
        tier.refresh()
