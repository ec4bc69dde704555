"""`deepinfer-recipe check`: a right server passes, every kind of fault of a wrong one is found."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deepinfer_recipe.check.answers import OwnAnswers, Reply
from deepinfer_recipe.check.cases import Case, read_cases
from deepinfer_recipe.check.run import check_reply
from deepinfer_recipe.check.sse import read_events
from deepinfer_recipe.cli import main

CORPUS = Path(__file__).parent / "corpus"
PATHS = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "messages"}
SHIPPED = read_cases(None)


def test_this_library_passes_the_shipped_and_the_recorded_cases(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check"]) == 0
    assert main(["check", str(CORPUS)]) == 0
    assert "342 cases" in capsys.readouterr().out


def test_a_record_that_says_otherwise_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, field in [("convert", "expect"), ("stream", "expect_response")]:
        case = json.loads((CORPUS / f"{name}.jsonl").read_text("utf-8").splitlines()[0])
        key = "prompt" if name == "convert" else "model"
        case[field][key] += "x"
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(case))
        assert main(["check", str(path)]) == 1
    assert "FAILED" in capsys.readouterr().out


class Server:
    """A tiny server: this library's answers, changed by `spoil`."""

    def __init__(self) -> None:
        self.spoil: Callable[[str, Reply], Reply] = lambda protocol, reply: reply
        self.seen: list[tuple[dict[str, str], Any]] = []
        answers, outer = OwnAnswers(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                protocol: Any = PATHS[self.path]
                outer.seen.append((dict(self.headers), raw))
                text = raw.decode().replace('"served"', '"DeepSeek-V4.1-Flash"')
                reply = outer.spoil(protocol, answers.ask(protocol, text))
                body = reply.body.encode()
                self.send_response(reply.status)
                self.send_header("Content-Type", reply.media_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


def test_a_right_server_passes_over_http(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHECK_KEY", "secret")
    options = ["--url", server.url + "/v1/", "--model", "served", "--api-key-env", "CHECK_KEY"]
    assert main(["check", *options]) == 0
    headers = [headers for headers, _ in server.seen]
    assert {h.get("Authorization") for h in headers} == {"Bearer secret", None}
    assert {h.get("x-api-key") for h in headers} == {"secret", None}
    assert b'"model": "served"' in server.seen[0][1]
    assert main(["check", str(CORPUS), *options, "--protocol", "responses"]) == 0
    assert "secret" not in capsys.readouterr().out


def edited(change: Callable[[str], str], *, streams: bool) -> Callable[[str, Reply], Reply]:
    """Change the body of good answers of one manner."""

    def spoil(protocol: str, reply: Reply) -> Reply:
        is_stream = reply.media_type == "text/event-stream"
        if reply.status != 200 or is_stream != streams:
            return reply
        return Reply(reply.status, reply.media_type, change(reply.body))

    return spoil


def renumbered(body: str) -> str:
    return body.replace('"sequence_number":3', '"sequence_number":33')


def repeated(body: str) -> str:
    """The last chunk twice."""
    return re.sub(r"(data: .*?\n\n)(data: \[DONE)", r"\1\1\2", body)


FAULTS: list[tuple[str, bool, Callable[[str], str]]] = [
    ("does not end with", True, lambda b: b.rsplit("data:", 1)[0]),
    ("its last event is lost", True, lambda b: b[:-1]),
    ("not JSON", True, lambda b: b.replace('"delta":', '"delta"', 1)),
    ("is no field of an event", True, lambda b: b + "oops\n\n"),
    ("has no data", True, lambda b: b + "event: empty\n\n"),
    ("sequence_number", True, renumbered),
    ("text is not that of the deltas", True, lambda b: b.replace('"delta":"', '"delta":"x', 1)),
    ("different ids", True, lambda b: b.replace('"id":"check-1"', '"id":"other"', 1)),
    ("finish_reason", True, lambda b: b.replace('"finish_reason":"stop"', '"finish_reason":null')),
    ("behind the finish_reason", True, repeated),
    ("the first delta has no role", True, lambda b: b.replace('"role":"assistant",', "")),
    ("index", True, lambda b: b.replace('"index":0', '"index":5')),
    ("named", True, lambda b: b.replace("event: content_block_delta", "event: block_delta")),
    ("message_stop", True, lambda b: b.replace("message_stop", "ping")),
    ("expected a JSON object", True, lambda b: b.replace('":"{', '":"{{')),
    ("an item that is not open", True, lambda b: b.replace('"item_id":"msg', '"item_id":"x')),
    ("are not", False, lambda b: re.sub(r'"total_tokens": ?\d+', '"total_tokens": 1', b)),
    ("missing", False, lambda b: b.replace('"usage"', '"used"')),
    ("negative", False, lambda b: re.sub(r'"output_tokens": ?\d+', '"output_tokens": -1', b)),
    ("stop_reason", False, lambda b: b.replace('"end_turn"', '"done"')),
    ("finish_reason", False, lambda b: b.replace('"stop"', '"tool_calls"')),
    ("expected a list", False, lambda b: b.replace('"content": [', '"content": 3, "x": [')),
    ("not JSON", False, lambda b: b + "}"),
]  # fmt: skip


@pytest.mark.parametrize(("told", "streams", "change"), FAULTS, ids=[f[0] for f in FAULTS])
def test_faults_in_answers_are_found(
    server: Server,
    told: str,
    streams: bool,
    change: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.spoil = edited(change, streams=streams)
    assert main(["check", "--url", server.url]) == 1
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "reply"),
    [
        ("expected a refusal", lambda r: Reply(200, r.media_type, r.body)),
        ("status 500", lambda r: Reply(500, r.media_type, r.body)),
        ("error: missing", lambda r: Reply(r.status, r.media_type, '{"detail": "no"}')),
        ("an error of type 'text/html'", lambda r: Reply(r.status, "text/html", r.body)),
        ("does not name", lambda r: Reply(r.status, r.media_type, NAMELESS)),
        ("not JSON", lambda r: Reply(r.status, r.media_type, "<html>")),
    ],
)
def test_faults_in_refusals_are_found(
    server: Server,
    told: str,
    reply: Callable[[Reply], Reply],
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.spoil = lambda protocol, good: reply(good) if good.status >= 400 else good
    assert main(["check", "--url", server.url]) == 1
    assert told in capsys.readouterr().out


NAMELESS = json.dumps(
    {"type": "error", "error": {"type": "t", "message": "wrong", "param": None, "code": None}}
)


def test_refusing_everything_or_streaming_as_json_fails(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.spoil = lambda protocol, reply: Reply(400, "application/json", NAMELESS)
    assert main(["check", "--url", server.url]) == 1
    assert "expected an answer" in capsys.readouterr().out
    server.spoil = lambda protocol, reply: Reply(reply.status, "application/json", reply.body)
    assert main(["check", "--url", server.url]) == 1
    assert "a stream of type 'application/json'" in capsys.readouterr().out


def test_an_answer_that_is_no_text_is_a_problem_not_a_crash() -> None:
    case = Case("x", "wire", "chat", {"stream": True}, {"expect": {"status": 200}})
    assert check_reply(case, Reply(200, "text/event-stream", "\udcff")) == ["the body is not UTF-8"]
    for body in ("", "data: 3\n\n", "data: {}\n\n", "data: [1]\n\n", "\x00\n\n", ": hi\n\n"):
        for protocol in ("chat", "responses", "messages"):
            stream = Case("x", "wire", protocol, {"stream": True}, {"expect": {"status": 200}})  # type: ignore[arg-type]
            assert check_reply(stream, Reply(200, "text/event-stream", body))
            whole = Case("x", "wire", protocol, {}, {"expect": {"status": 200}})  # type: ignore[arg-type]
            assert check_reply(whole, Reply(200, "application/json", body))


def test_events_are_read_as_the_standard_says() -> None:
    events, problems = read_events(": hi\r\nevent: a\r\ndata: 1\r\ndata:2\r\n\r\nretry: 3\n\n")
    assert problems == []
    assert [(e.name, e.data) for e in events] == [("a", "1\n2")]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--url", "ftp://x"], "--url wants http"),
        (["--url", "http://127.0.0.1:1", "--api-key-env", "NOT_SET_ANYWHERE"], "is not set"),
        (["/does/not/exist.jsonl"], "exist"),
    ],
)
def test_misuse_is_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 1
    told_lines = capsys.readouterr().err.splitlines()
    assert len(told_lines) == 1
    assert told in told_lines[0]


def test_a_corpus_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cases.jsonl"
    for text, told in [("{", "cases.jsonl:1: not JSON"), ('{"a": 1}\n', "holds no cases")]:
        path.write_text(text)
        assert main(["check", str(path)]) == 1
        assert told in capsys.readouterr().err
