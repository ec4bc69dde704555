"""Starts that are refused, or told to be weak."""

from __future__ import annotations

import errno

import pytest
from server_fakes import FakeClock, FakeEngine, Script, byte_codec

from deepinfer_engine.errors import ConfigError
from deepinfer_engine.server import run
from deepinfer_engine.server.app import create_app
from deepinfer_engine.server.exposure import refuse_open, warnings
from deepinfer_engine.settings import Settings

STRONG = "k3Jd82mfLq0aZx71TnbvWe5R"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "box.example"])
def test_a_server_others_reach_wants_keys_or_to_be_told(host):
    with pytest.raises(ConfigError, match="open-to-all"):
        refuse_open(Settings(host=host), {})
    refuse_open(Settings(host=host), {"a": STRONG})
    refuse_open(Settings(host=host, open_to_all=True), {})
    with pytest.raises(ConfigError, match="open-to-all"):
        create_app(FakeEngine(Script()), byte_codec(), Settings(host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.9.1"])
def test_a_server_of_this_machine_may_be_open(host):
    refuse_open(Settings(host=host), {})
    assert warnings(Settings(host=host), {}, None) == []


def test_weak_keys_are_told_by_name_and_never_shown():
    keys = {"short": "hunter2hunter2", "flat": "a" * 40, "good": STRONG}
    found = warnings(Settings(), keys, "admin")
    assert [text for text in found if "short" in text and "14 characters" in text]
    assert [text for text in found if "flat" in text and "1 different" in text]
    assert [text for text in found if "admin key" in text]
    assert not [text for text in found if "good" in text]
    assert not [text for text in found for secret in (*keys.values(),) if secret in text]


def test_key_files_that_others_may_read_are_told(tmp_path):
    path = tmp_path / "keys"
    path.write_text(STRONG)
    for mode, told in ((0o600, False), (0o400, False), (0o644, True), (0o620, True)):
        path.chmod(mode)
        found = warnings(Settings(api_key_file=path, admin_key_file=None), {}, None)
        assert bool([text for text in found if "chmod 600" in text]) is told


def test_an_admin_key_that_is_an_api_key_is_told():
    assert [t for t in warnings(Settings(), {"a": STRONG}, STRONG) if "also an API key" in t]


def test_everything_allowed_without_a_key_is_told():
    settings = Settings(cors_origins=("*",), allowed_hosts=("*",))
    assert len(warnings(settings, {}, None)) == 2
    assert warnings(settings, {"a": STRONG}, None) == []


@pytest.mark.parametrize("origin", ["evil.example", "https://a.example/path", "https://"])
def test_an_origin_that_is_none_is_refused_at_start(origin):
    with pytest.raises(ValueError, match="scheme://host"):
        Settings(cors_origins=(origin,))


def test_connections_are_bounded_by_the_files_a_process_may_open(monkeypatch, caplog):
    limits = {"now": (64, 256)}
    monkeypatch.setattr(run.resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(run.resource, "setrlimit", lambda kind, new: limits.update(now=new))
    assert run.room_for_connections(1024) == 128
    assert limits["now"] == (256, 256)
    assert "at most 128 connections" in caplog.text
    limits["now"] = (64, 4096)
    assert run.room_for_connections(1024) == 1024
    assert limits["now"] == (1152, 4096)


def test_accepts_that_fail_are_told_once_in_ten_seconds(caplog):
    import asyncio

    async def go():
        loop, clock = asyncio.get_running_loop(), FakeClock()
        run.quiet_accepts(loop, clock)
        context = {
            "message": "socket.accept() out of system resource",
            "exception": OSError(errno.EMFILE, "Too many open files"),
        }
        for _ in range(2000):
            loop.call_exception_handler(context)
        clock.now += 11
        loop.call_exception_handler(context)
        loop.call_exception_handler({"message": "something else"})

    asyncio.run(go())
    accepts = [r.getMessage() for r in caplog.records if "cannot accept" in r.getMessage()]
    assert len(accepts) == 2
    assert "(2000 times)" in accepts[1]
    assert "something else" in caplog.text
