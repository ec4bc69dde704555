"""Routes that tell the workers and empty one, and the command that uses them."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from server_fakes import byte_codec
from server_socket import serving

from deepinfer_engine.cli.main import run as command
from deepinfer_engine.errors import EngineUnavailable, RequestError
from deepinfer_engine.router.client import WorkerStatus
from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings

ADMIN = {"Authorization": "Bearer an-admin-key-of-length"}


@pytest.fixture
def admin_settings(tmp_path):
    path = tmp_path / "admin"
    path.write_text("an-admin-key-of-length\n")
    return {"admin_key_file": path}


@pytest.mark.parametrize(("method", "path"), [("GET", "/admin/workers"), ("POST", "/admin/drain")])
def test_the_routes_want_the_admin_key(request_json, say, admin_settings, method, path):
    assert request_json(say(""), method, path, settings=admin_settings).status_code == 403
    assert request_json(say(""), method, path).status_code == 403


def test_a_drained_server_takes_nothing_until_told_otherwise(make_app, say, admin_settings):
    async def go():
        app, _, _ = make_app(say("hello"), **admin_settings)
        chat = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def post(path, body, headers=None):
                return await client.post(path, json=body, headers=headers)

            before = await post("/v1/chat/completions", chat)
            told = await post("/admin/drain", {}, ADMIN)
            refused = await post("/v1/chat/completions", chat)
            ready = await client.get("/health/ready")
            undone = await post("/admin/drain", {"on": False}, ADMIN)
            after = await post("/v1/chat/completions", chat)
        assert before.status_code == after.status_code == 200
        assert (told.json()["draining"], undone.json()["draining"]) == (True, False)
        assert (refused.status_code, ready.status_code) == (503, 503)
        assert refused.headers["retry-after"]

    asyncio.run(go())


@pytest.mark.parametrize(
    "body", [{"worker": 5}, {"wrker": "a"}, {"on": "perhaps"}, {"move": True}, {"worker": "w0"}]
)
def test_orders_that_make_no_sense_name_their_field(request_json, say, admin_settings, body):
    answer = request_json(
        say(""), "POST", "/admin/drain", json=body, headers=ADMIN, settings=admin_settings
    )
    assert answer.status_code == 400
    assert next(iter(body)) in answer.text or "one process" in answer.text


class Fleet:
    """Two workers; what the first one runs ends after it was asked twice."""

    def __init__(self):
        self.orders = []
        self.left = 2

    async def status(self):
        draining = bool(self.orders)
        if draining:
            self.left = max(0, self.left - 1)
        return [
            WorkerStatus("10.0.0.1:1", "decode", ready=not draining, draining=draining,
                         running=self.left),
            WorkerStatus("10.0.0.2:1", "decode", ready=True, running=7),
        ]  # fmt: skip

    def hear(self, body, signed):
        raise AssertionError

    async def drain(self, worker, *, on=True, move=False):
        if worker != "10.0.0.1:1":
            raise RequestError(f"there is no worker {worker!r}")
        if move:
            raise EngineUnavailable("no other decode worker is ready")
        self.orders.append((worker, on))


def test_the_command_waits_until_the_worker_is_empty(admin_settings, capsys, monkeypatch):
    monkeypatch.setattr("deepinfer_engine.cli.fleet._EVERY_S", 0.0)
    fleet = Fleet()
    key = ["--admin-key-file", str(admin_settings["admin_key_file"])]
    with serving(lambda: create_app(fleet, byte_codec(), Settings(**admin_settings))) as server:
        drain = ["drain", server.url, *key]
        assert command([*drain, "--worker", "10.0.0.1:1"]) == 0
        assert "0 requests left" in capsys.readouterr().out
        assert command([*drain, "--worker", "10.0.0.1:1", "--undo"]) == 0
        assert fleet.orders == [("10.0.0.1:1", True), ("10.0.0.1:1", False)]
        assert command([*drain, "--worker", "10.0.0.9:1"]) == 1
        assert "no worker" in capsys.readouterr().err
        assert command([*drain, "--worker", "10.0.0.1:1", "--move"]) == 4
        assert command(["drain", server.url]) == 3
        assert command([*drain]) == 0
        assert server.app.state.services.gate.draining
