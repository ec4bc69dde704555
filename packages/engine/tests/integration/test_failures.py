"""What is killed, broken or in the way: nobody hangs, nobody is left behind, and the server comes
back.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import httpx
import pytest

from deepinfer_engine.demo import demo_path

BLOCK = 128


def ask(server, text, **more):
    model = server.get("/v1/models").json()["data"][0]["id"]
    body = {
        "model": model,
        "temperature": 0,
        "max_tokens": 16,
        "messages": [{"role": "user", "content": text}],
    }
    return {**body, **more}


def cached(reply) -> int:
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_flushed_cache_survives_the_death_of_every_process(start, tmp_path, system_prompt):
    key = tmp_path / "admin"
    key.write_text("0123456789abcdefghij")
    key.chmod(0o600)
    server = start("--admin-key-file", str(key), cache_dir=tmp_path / "kv").wait_ready()
    body = ask(server, system_prompt + " Hello!")
    first = server.post("/v1/chat/completions", body)
    assert cached(first) == 0
    assert server.post("/admin/flush", None).status_code == 403
    admin = {"authorization": "Bearer 0123456789abcdefghij"}
    assert server.post("/admin/flush", None, headers=admin).json() == {"flushed": True}
    server.kill_everything()
    again = start(cache_dir=tmp_path / "kv").wait_ready()
    second = again.post("/v1/chat/completions", body)
    assert cached(second) == (second.json()["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert second.json()["choices"] == first.json()["choices"]


def test_a_stream_outlives_its_decode_worker_which_is_replaced(start, until):
    server = start("--dtype", "float64").wait_ready()
    body = ask(server, "Tell me a story.", stream=True, max_tokens=60, ignore_eos=True)
    whole = server.post("/v1/chat/completions", {**body, "stream": False}).json()
    expected = whole["choices"][0]["message"]
    before = server.worker_pids()
    said = {"content": "", "reasoning_content": ""}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=90) as reply:
        killed = False
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                for part in said:
                    said[part] += choice["delta"].get(part) or ""
            if not killed and any(said.values()):
                os.kill(before["decode"], signal.SIGKILL)
                killed = True
    assert killed
    assert said == {part: expected.get(part) or "" for part in said}
    after = until(lambda: _replaced(server, "decode", before))
    assert after["prefill"] == before["prefill"]
    until(lambda: server.get("/health/ready").status_code == 200)
    # A dead prefill worker holds no stream; it is replaced all the same.
    os.kill(after["prefill"], signal.SIGKILL)
    until(lambda: _replaced(server, "prefill", after))
    until(lambda: server.post("/v1/chat/completions", ask(server, "Hello!")).status_code == 200)


def _replaced(server, role, before):
    pids = server.worker_pids()
    return pids if pids.get(role) not in (None, before[role]) else None


def test_sigterm_lets_a_running_answer_end_and_takes_the_workers_along(start, processes):
    alive, children_of = processes
    server = start().wait_ready()
    children = children_of(server.process.pid)
    assert len(children) == 2
    body = ask(server, "Tell me a story.", stream=True, max_tokens=150, ignore_eos=True)
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert server.process.wait(60) == 0
    assert not any(map(alive, children))


def test_a_second_signal_ends_at_once_and_leaves_nobody(start, processes, until):
    alive, children_of = processes
    server = start().wait_ready()
    children = children_of(server.process.pid)
    body = ask(server, "Tell me a story.", stream=True, max_tokens=8000, ignore_eos=True)
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=60) as reply:
        next(reply.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any("draining" in line for line in server.lines))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 130
    until(lambda: not any(map(alive, children)))


def test_workers_end_when_the_server_is_killed(start, processes, until):
    alive, children_of = processes
    server = start().wait_ready()
    children = children_of(server.process.pid)
    server.process.kill()
    server.process.wait(60)
    until(lambda: not any(map(alive, children)))


def test_a_busy_port_is_one_line_and_no_worker_is_started(shared, start):
    port = shared.url.rpartition(":")[2]
    second = start("--port", port)
    assert second.process.wait(60) == 3
    second.terminate()
    assert [line for line in second.lines if line] == [second.lines[0]]
    assert "in use" in second.lines[0]


def damaged(tmp_path, damage):
    model = tmp_path / "model"
    shutil.copytree(demo_path(), model)
    weights = model / "model.safetensors"
    if damage == "truncated":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "missing":
        weights.unlink()
    else:
        (model / "config.json").write_text("{")
    return str(model)


def the_error(stderr: str) -> str:
    """The one line of error; warnings of the log may stand before it, a traceback may not."""
    assert "Traceback" not in stderr
    (line,) = (line for line in stderr.splitlines() if line.startswith("deepinfer: error: "))
    assert stderr.rstrip().endswith(line)
    return line


def test_a_corrupt_checkpoint_is_one_line_and_exit_3(start, tmp_path):
    server = start("--model", damaged(tmp_path, "truncated"))
    assert server.process.wait(90) == 3
    server.terminate()
    assert "model.safetensors" in the_error("\n".join(server.lines))


@pytest.mark.parametrize("damage", ["missing", "not json"])
def test_a_worker_alone_tells_a_corrupt_checkpoint_the_same_way(tmp_path, damage):
    argv = [sys.executable, "-m", "deepinfer_engine.cli.main", "decode", "--no-cache"]
    result = subprocess.run(
        [*argv, "--model", damaged(tmp_path, damage)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 3
    assert str(tmp_path) in the_error(result.stderr)
