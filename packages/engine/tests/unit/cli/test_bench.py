"""`deepinfer bench` against a server on a socket: its counts are the server's."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from server_fakes import FakeEngine, Script, byte_codec
from server_socket import serving

from deepinfer_engine.cli import main as cli
from deepinfer_engine.cli.load.workload import Words, agents, mooncake, plain
from deepinfer_engine.errors import ConfigError, EngineLost
from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings

WORDS = Words(range(100, 400))


@contextmanager
def served(script) -> Iterator[tuple[str, FakeEngine]]:
    engine = FakeEngine(script)
    with serving(lambda: create_app(engine, byte_codec(), Settings())) as server:
        yield server.url, engine


def answer(request) -> Script:
    """As many tokens as are asked for, the first block cached behind the first request."""
    most = request.sampling.max_tokens
    return Script([[70, 71]] * most, cached=min(16, len(request.token_ids) - 1))


def result(capsys, *argv, code=0):
    assert cli.run(["bench", *argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_closed_loop_counts_what_the_server_counts(capsys, tmp_path):
    page = tmp_path / "report.html"
    with served(answer) as (url, engine):
        found = result(
            capsys, url, "--requests", "12", "--concurrency", "3", "--prompt-tokens", "40",
            "--output-tokens", "6", "--shared", "16", "--report", str(page),
        )  # fmt: skip
        assert (found["answers"], found["output_tokens"], found["failed"]) == (12, 72, {})
        assert found["server"] == {
            "answers": 12, "prompt_tokens": 480, "cached_tokens": 192, "output_tokens": 72,
            "same": True,
        }  # fmt: skip
        assert found["hit_rate"] == 192 / 480
        assert 0 < found["ttft"]["p50"] <= found["ttft"]["p99"] <= found["e2e"]["p99"]
        prompts = [request.token_ids for request in engine.requests]
        assert len(set(prompts)) == 12
        assert len({prompt[:16] for prompt in prompts}) == 1
        # The same seed makes the same prompts, another one others.
        engine.requests.clear()
        result(capsys, url, "--requests", "12", "--prompt-tokens", "40", "--shared", "16")
        assert {r.token_ids for r in engine.requests} == set(prompts)
    text = page.read_text(encoding="utf-8")
    assert "12 of 12" in text
    charts = text[text.index("<svg") : text.rindex("</svg>") + 6]
    root = ElementTree.fromstring(f"<all>{charts}</all>")
    assert len(root) == 3
    assert len(root[0].findall("circle")) == 12
    assert "http" not in text.replace(url, "")


def test_an_open_loop_begins_sessions_whether_others_ended_or_not(capsys):
    with served(answer) as (url, engine):
        argv = ("--rate", "1000", "--prompt-tokens", "20", "--output-tokens", "2")
        found = result(capsys, url, "--requests", "10", *argv)
    assert (found["answers"], found["server"]["same"]) == (10, True)
    assert len(engine.requests) == 10


def test_agents_grow_their_prompts_behind_a_shared_beginning(capsys):
    with served(answer) as (url, engine):
        found = result(
            capsys, url, "--sessions", "3", "--turns", "4", "--shared", "32", "--prompt-tokens",
            "10", "--output-tokens", "5", "--concurrency", "1",
        )  # fmt: skip
    assert (found["answers"], found["server"]["same"]) == (12, True)
    lengths = [len(request.token_ids) for request in engine.requests]
    assert lengths == [42, 57, 72, 87] * 3
    for before, after in zip(engine.requests, engine.requests[1:], strict=False):
        if len(after.token_ids) > 42:
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
    assert len({request.token_ids[:32] for request in engine.requests}) == 1


TRACE = [
    {"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [1, 2]},
    {"timestamp": 40, "input_length": 1024, "output_length": 10, "hash_ids": [1, 3]},
    {"timestamp": 40, "input_length": 600, "output_length": 0, "hash_ids": [4]},
]


def test_a_mooncake_trace_keeps_its_lengths_times_and_shared_blocks(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, TRACE)) + "\n\n")
    with served(answer) as (url, engine):
        found = result(capsys, url, "--trace", str(path), "--scale", "0.25", "--speed", "2")
    assert (found["answers"], found["server"]["same"]) == (3, True)
    by_length = sorted(engine.requests, key=lambda request: len(request.token_ids))
    third, first, second = (request.token_ids for request in by_length)
    assert (len(first), len(second), len(third)) == (175, 256, 150)
    assert first[:128] == second[:128]
    assert first[128:] != second[128:175]
    assert [r.sampling.max_tokens for r in by_length] == [1, 5, 2]
    sessions = list(mooncake(WORDS, map(json.dumps, TRACE), requests=2, speed=2, scale=1))
    assert [session.at_s for session in sessions] == [0.0, 0.02]
    assert [len(session.turns[0].tokens) for session in sessions] == [700, 1024]


NEGATIVE = {"timestamp": 1, "input_length": -1, "output_length": 1, "hash_ids": []}


@pytest.mark.parametrize("line", ["{}", "no json", json.dumps(NEGATIVE)])
def test_a_line_that_is_no_trace_is_named(line):
    with pytest.raises(ConfigError, match="line 2"):
        list(mooncake(WORDS, [json.dumps(TRACE[0]), line], requests=None, speed=1, scale=1))


def test_failures_are_counted_and_told_by_the_exit_code(capsys):
    calls = iter(range(99))

    def sometimes(request):
        if next(calls) % 2:
            return Script([[70]], raise_at=(1, EngineLost("gone")))
        return answer(request)

    with served(sometimes) as (url, _):
        found = result(
            capsys, url, "--requests", "6", "--concurrency", "1", "--output-tokens", "3", code=6
        )
    assert found["answers"] == 3
    assert sum(found["failed"].values()) == 3
    assert found["server"]["same"]  # what failed is in neither's counts
    assert cli.run(["bench", "http://127.0.0.1:9"]) == 4
    assert cli.run(["bench", url, "--rate", "1", "--trace", "x"]) == 2
    assert cli.run(["bench", url, "--trace", "/nowhere.jsonl"]) == 3


def test_workloads_follow_from_their_seed():
    def load(seed):
        more = {"prompt_tokens": 8, "output_tokens": 2, "shared": 4, "seed": seed}
        return (
            list(plain(WORDS, requests=4, **more)),
            list(agents(WORDS, sessions=2, turns=2, pause_s=0.5, **more)),
        )

    assert load(1) == load(1)
    assert load(1) != load(2)
    pauses = [turn.pause_s for session in load(1)[1] for turn in session.turns]
    assert pauses == [0, 0.5, 0, 0.5]
