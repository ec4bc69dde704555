"""The commands a user types first, with the embedded model and nothing else running."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest


@pytest.fixture
def deepinfer(tmp_path):
    def run(*argv: str, **kwargs) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "deepinfer_engine.cli.main", *argv],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            timeout=170,
            check=False,
            **kwargs,
        )

    return run


def test_the_demo_starts_three_processes_talks_twice_and_shows_what_the_cache_saved(deepinfer):
    result = deepinfer("demo", "--cache-dir", "kv")
    assert result.returncode == 0, result.stderr
    assert "a router, a prefill and a decode process" in result.stderr
    turns = re.findall(r"(\d+) prompt tokens \((\d+) cached\), (\d+) out", result.stderr)
    (first_prompt, first_cached, _), (_, second_cached, out) = (map(int, turn) for turn in turns)
    assert first_prompt >= 300
    assert first_cached == 0
    assert second_cached == first_prompt // 128 * 128
    assert out > 0
    assert result.stdout.strip()
    assert "curl " in result.stderr
    assert "Traceback" not in result.stderr


def test_generate_answers_a_file_reports_broken_lines_and_goes_on(deepinfer, tmp_path):
    good = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    source = tmp_path / "in.jsonl"
    source.write_text(
        json.dumps(good) + "\n{broken\n" + json.dumps({"custom_id": "c", "body": good}) + "\n"
    )
    first = deepinfer("generate", "in.jsonl", "out.jsonl", "--no-cache")
    assert first.returncode == 1, first.stderr  # a line failed
    assert "in.jsonl:2: not JSON" in first.stderr
    assert "2 answered, 1 failed" in first.stderr
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [result["line"] for result in results] == [1, 2, 3]
    assert results[0]["response"]["usage"]["completion_tokens"] > 0
    assert results[2]["custom_id"] == "c"
    # Cut in the middle of the last result, it answers that one again, and asks what failed again.
    text = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text(text[:-30])
    again = deepinfer("generate", "in.jsonl", "out.jsonl", "--no-cache")
    assert "1 answered, 1 failed" in again.stderr


def test_chat_talks_to_the_model_in_this_process_and_says_that_it_is_a_toy(deepinfer):
    result = deepinfer("chat", "Hello!", "--no-cache", "--max-tokens", "20", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    assert "toy" in result.stderr.splitlines()[0]
    assert re.search(r"\d+ prompt tokens \(0 cached\), \d+ out", result.stderr)
    assert result.stdout.strip()


def test_chat_holds_a_conversation_with_a_server(deepinfer, shared):
    said = "Hello, my name is Ana.\n\nWhat is my name?\n"
    result = deepinfer("chat", "--url", shared.url, "--max-tokens", "40", input=said)
    assert result.returncode == 0, result.stderr
    prompts = [int(count) for count in re.findall(r"(\d+) prompt tokens", result.stderr)]
    assert len(prompts) == 2
    assert prompts[1] > prompts[0]


def test_doctor_finds_nothing_broken_here(deepinfer):
    result = deepinfer("doctor", "--json", "--port", "0", "--cache-dir", "kv")
    report = json.loads(result.stdout)
    assert result.returncode == 0, report
    assert {"torch", "kernels", "tokenizer", "model"} <= {
        check["name"] for check in report["checks"]
    }


def test_doctor_exits_6_for_a_model_that_does_not_load(deepinfer, tmp_path):
    (tmp_path / "empty").mkdir()
    result = deepinfer("doctor", "--model", "empty", "--port", "0", "--cache-dir", "kv")
    assert result.returncode == 6
    assert "fail model" in result.stdout
    assert "Traceback" not in result.stderr
