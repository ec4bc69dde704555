"""The offline batch: order, broken lines, and going on where a run was cut."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console
from server_fakes import FakeEngine, Script, byte_codec

from deepinfer_engine.cli import launch
from deepinfer_engine.cli.generate import Line, answered, answers, run_generate
from deepinfer_engine.errors import ConfigError, EngineLost
from deepinfer_engine.settings import Settings


@pytest.fixture
def codec():
    return byte_codec()


def question(text):
    return json.dumps(
        {"messages": [{"role": "user", "content": text}], "thinking": {"type": "disabled"}}
    )


def collect(engine, codec, lines, concurrency=4):
    async def go():
        return [pair async for pair in answers(engine, codec, lines, concurrency)]

    return asyncio.run(go())


def test_results_keep_the_order_of_the_input_whatever_ends_first(codec):
    gate = asyncio.Event()

    def script(request):
        ids = [*codec.tokenize(f"answer {len(engine.requests)}"), 1]
        if len(engine.requests) == 1:
            return Script([ids], gates={0: gate})
        gate.set()
        return Script([ids])

    engine = FakeEngine(script)
    lines = [Line(number, question(f"q{number}")) for number in (1, 2, 4)]
    results = collect(engine, codec, lines)
    assert [line.number for line, _ in results] == [1, 2, 4]
    texts = [result["response"]["choices"][0]["message"]["content"] for _, result in results]
    assert texts == ["answer 1", "answer 2", "answer 3"]


def test_no_more_requests_run_than_allowed(codec):
    most = 0

    def script(request):
        nonlocal most
        most = max(most, len(engine.live) + 1)
        return Script([[*codec.tokenize("x"), 1]] * 3)

    engine = FakeEngine(script)
    collect(engine, codec, [Line(n, question(str(n))) for n in range(1, 12)], concurrency=3)
    assert most <= 3


@pytest.mark.parametrize(
    "text", ["{", "[1]", "3", '{"messages": []}', '{"body": 3}', question("x" * 9000)]
)
def test_a_broken_line_is_an_error_result_and_the_others_are_answered(codec, text):
    engine = FakeEngine(Script([[*codec.tokenize("fine"), 1]]))
    results = collect(
        engine, codec, [Line(1, question("a")), Line(2, text), Line(3, question("b"))]
    )
    assert [("error" in result) for _, result in results] == [False, True, False]
    assert results[1][1]["error"]["message"]


def test_batch_entries_and_streaming_bodies_are_understood(codec):
    engine = FakeEngine(Script([[*codec.tokenize("fine"), 1]]))
    entry = {
        "custom_id": "c1",
        "body": {**json.loads(question("a")), "stream": True, "stream_options": {}},
    }
    ((_, result),) = collect(engine, codec, [Line(1, json.dumps(entry))])
    assert result["response"]["choices"][0]["message"]["content"] == "fine"


def test_a_lost_engine_ends_the_run_instead_of_failing_every_line(codec):
    engine = FakeEngine(Script([[65]], raise_at=(0, EngineLost("gone"))))
    with pytest.raises(EngineLost):
        collect(engine, codec, [Line(1, question("a")), Line(2, question("b"))])
    assert not engine.live


def written(line):
    return json.dumps({"line": line.number, "input": line.digest, "response": {}}) + "\n"


def test_a_run_goes_on_behind_the_last_whole_line(tmp_path):
    lines = {n: Line(n, question(str(n))) for n in (1, 2, 5)}
    out = tmp_path / "out.jsonl"
    assert answered(out, lines) == set()
    out.write_text(written(lines[1]) + written(lines[2])[:-20])
    assert answered(out, lines) == {1}
    assert out.read_text() == written(lines[1])
    out.write_text(written(lines[1]) + written(lines[2]))
    assert answered(out, lines) == {1, 2}


def test_results_of_another_input_are_not_continued(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text(written(Line(1, question("other"))))
    with pytest.raises(ConfigError, match="another input"):
        answered(out, {1: Line(1, question("mine"))})


@pytest.mark.parametrize("text", ["hello\n", "[]\n", '{"line": 1}\n', "\x00\n"])
def test_a_file_of_something_else_is_not_touched(tmp_path, text):
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    with pytest.raises(ConfigError, match="not a result file"):
        answered(out, {1: Line(1, "x")})
    assert out.read_text() == text


def test_a_target_in_no_directory_is_told_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        answered(tmp_path / "none" / "out.jsonl", {})
    with pytest.raises(ConfigError, match="is a directory"):
        answered(tmp_path, {})


@pytest.fixture
def run(codec, monkeypatch, tmp_path):
    """`run(texts, strict)` runs the whole command over a scripted engine; gives (code, told,
    results).
    """

    @asynccontextmanager
    async def launched(settings):
        yield FakeEngine(Script([[*codec.tokenize("fine"), 1]]))

    monkeypatch.setattr(launch, "launched_engine", launched)
    monkeypatch.setattr(launch, "build_codec", lambda settings: codec)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def go(texts, *, strict=False, source=source):
        if texts is not None:
            source.write_text("\n".join(texts))
        told = io.StringIO()
        console = Console(file=told, width=200)
        code = run_generate(
            Settings(), source, target, strict=strict, concurrency=2, console=console
        )
        results = [json.loads(line) for line in target.read_text().splitlines()]
        return code, told.getvalue(), results

    return go


def test_a_broken_line_is_told_with_its_number_and_the_run_goes_on(run):
    code, told, results = run([question("a"), "{", "", question("b")])
    assert code == 1
    assert "in.jsonl:2: not JSON" in told
    assert "2 answered, 1 failed" in told
    assert [(result["line"], "error" in result) for result in results] == [
        (1, False),
        (2, True),
        (4, False),
    ]


def test_strict_stops_at_the_first_broken_line_and_goes_on_there_once_it_is_mended(run):
    code, _, results = run([question("a"), "{", question("b")], strict=True)
    assert code == 1
    assert [result["line"] for result in results] == [1]
    code, told, results = run([question("a"), question("mended"), question("b")], strict=True)
    assert (code, [result["line"] for result in results]) == (0, [1, 2, 3])
    assert "2 answered, 0 failed" in told


def test_lines_that_failed_are_asked_again_and_come_to_their_places(run):
    run([question("a"), "{", question("b")])
    code, told, results = run([question("a"), question("mended"), question("b")])
    assert (code, [result["line"] for result in results]) == (0, [1, 2, 3])
    assert not any("error" in result for result in results)
    assert "1 answered, 0 failed" in told


def test_a_damaged_byte_spoils_its_line_and_a_byte_order_mark_none(run, tmp_path):
    run([])  # makes the files
    data = b"\xef\xbb\xbf" + question("a").encode() + b'\n{"messages": "\xff"}\n' + b"[" * 20_000
    (tmp_path / "raw.jsonl").write_bytes(data)
    code, told, results = run(None, source=tmp_path / "raw.jsonl")
    assert code == 1
    assert [(result["line"], "error" in result) for result in results] == [
        (1, False),
        (2, True),
        (3, True),
    ]
    assert "raw.jsonl:2: not UTF-8" in told


def test_requests_may_come_from_standard_input(run, monkeypatch):
    data = io.BytesIO(question("a").encode() + b"\n" + question("b").encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(data))
    code, _, results = run(None, source=Path("-"))
    assert (code, [result["line"] for result in results]) == (0, [1, 2])
