"""A decode worker that is several processes: same answers, live balancing, and what it survives."""

from __future__ import annotations

import json
import os
import signal

import httpx
import pytest

STORY = "Tell me a story."
RESTART_S = 120.0
"""Two processes load a model, on a machine that may be busy."""


def body_of(server, text, **more):
    model = server.get("/v1/models").json()["data"][0]["id"]
    return {
        "model": model,
        "temperature": 0,
        "max_tokens": 60,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": text}],
        **more,
    }


def said(reply) -> dict[str, str]:
    assert reply.status_code == 200, reply.text
    message = reply.json()["choices"][0]["message"]
    return {part: message.get(part) or "" for part in ("content", "reasoning_content")}


def member_of(server, processes) -> int:
    """The other process of the decode worker's group."""
    _, children_of = processes
    (member,) = children_of(server.worker_pids()["decode"])
    return member


@pytest.fixture(scope="module")
def expected(running_server) -> dict[str, str]:
    with running_server("--dtype", "float64", "--single-process") as server:
        return said(server.post("/v1/chat/completions", body_of(server, STORY)))


@pytest.fixture(scope="module")
def group(running_server):
    with running_server("--dtype", "float64", "--ep", "2", "--ep-rebalance-steps", "20") as server:
        yield server


def test_a_group_answers_like_one_process_while_its_experts_move(group, expected, until) -> None:
    server = group
    assert said(server.post("/v1/chat/completions", body_of(server, STORY))) == expected
    assert said(server.post("/v1/chat/completions", body_of(server, STORY))) == expected
    until(lambda: server.metric("deepinfer_worker_eplb_layers_moved_total", role="decode") > 0)
    assert server.metric("deepinfer_worker_eplb_plans_accepted_total", role="decode") > 0
    assert server.metric("deepinfer_worker_ep_processes", role="decode") == 2
    assert server.metric("deepinfer_worker_eplb_balance", role="decode") >= 1
    assert server.metric("deepinfer_worker_ep_processes", role="prefill") == 0


def test_a_prefill_worker_shares_experts_too(running_server, expected) -> None:
    with running_server("--dtype", "float64", "--ep", "2", "--prefill-ep", "2") as server:
        assert said(server.post("/v1/chat/completions", body_of(server, STORY))) == expected
        assert server.metric("deepinfer_worker_ep_processes", role="prefill") == 2
        assert server.metric("deepinfer_worker_ep_processes", role="decode") == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stream_outlives_a_process_of_the_group(
    group, expected, processes, until, number
) -> None:
    """Killed: heard of at once. Stopped: given up by the watchdog. Both end the worker, which is
    started again; the request is carried on."""
    server = group
    alive, _ = processes
    until(lambda: server.get("/health/ready").status_code == 200, RESTART_S)
    before, member = server.worker_pids(), member_of(server, processes)
    text = dict.fromkeys(expected, "")
    hit = False
    stream = body_of(server, STORY, stream=True)
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json=stream, timeout=90
    ) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                for part in text:
                    text[part] += choice["delta"].get(part) or ""
            if not hit and any(text.values()):
                os.kill(member, number)
                hit = True
    assert hit
    assert text == expected
    until(lambda: server.worker_pids().get("decode") not in (None, before["decode"]), RESTART_S)
    until(lambda: not alive(member))
    assert server.worker_pids()["prefill"] == before["prefill"]


def test_an_idle_group_that_loses_a_process_is_started_again(group, processes, until) -> None:
    server = group
    until(lambda: server.get("/health/ready").status_code == 200, RESTART_S)
    before = server.worker_pids()["decode"]
    os.kill(member_of(server, processes), signal.SIGKILL)
    until(lambda: server.worker_pids().get("decode") not in (None, before), RESTART_S)
    until(lambda: server.get("/health/ready").status_code == 200, RESTART_S)
    assert said(server.post("/v1/chat/completions", body_of(server, STORY)))["content"]
