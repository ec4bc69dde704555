"""The page at `/` in a real browser, over a real socket and an engine that says what it is told."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from browser import BROWSER, Page
from server_fakes import FakeEngine, Script, byte_codec
from server_socket import serving

from deepinfer_engine.errors import EngineLost, EngineUnavailable
from deepinfer_engine.router.client import WorkerStatus
from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium: apt install chromium")
WORKERS = [
    WorkerStatus(
        f"127.0.0.1:700{i}", role, ready=True, pid=i,
        gauges={"running": 1.0, "waiting": 2.0, "blocks_free": 60.0, "blocks_capacity": 100.0},
    )
    for i, role in enumerate(("prefill", "decode"))
]  # fmt: skip
SHOTS = os.environ.get("DEEPINFER_TEST_SHOTS")
"""A folder for screenshots, to be looked at."""
DSML = "\uff5cDSML\uff5c"
FORGED = "<img src=x onerror=alert(1)><b id=forged>bold</b>"


def ids(text: str) -> list[int]:
    return byte_codec().tokenize(text)


def steps(text: str, size: int = 8) -> list[list[int]]:
    found = ids(text)
    return [found[i : i + size] for i in range(0, len(found), size)]


def speaker(answers):
    """An engine's script: the next of some answers each time."""
    left = iter(answers)
    return lambda request: next(left)


@contextmanager
def page(tmp_path, script, *, width=1360, **settings) -> Iterator[tuple[Page, FakeEngine]]:
    engine = FakeEngine(script)
    engine.workers = list(WORKERS)
    settings = {"prices": "published", "priced_as": "deepseek-flash", **settings}
    with serving(lambda: create_app(engine, byte_codec(), Settings(**settings))) as server:
        browser = Page(tmp_path / "profile", width)
        try:
            browser.open(server.url + "/")
            browser.until("document.querySelector('#model').value")
            browser.until("document.querySelector('#workers').children.length")
            engine.url = server.url
            yield browser, engine
        finally:
            browser.close()


def shoot(browser: Page, name: str) -> None:
    if SHOTS:
        browser.screenshot(Path(SHOTS) / f"{name}.png")


def narrow_enough(browser: Page) -> bool:
    return browser.run("document.documentElement.scrollWidth <= innerWidth")


def ask(browser: Page, text: str) -> None:
    browser.type(text)
    browser.press("Enter")


ENDED = (
    "document.body.dataset.busy === 'no' && document.querySelectorAll('.assistant .usage').length"
)


def test_the_page_is_three_files_and_loads_nothing_from_elsewhere(make_app):
    import httpx

    app, _, _ = make_app(Script())

    async def go():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.get(p) for p in ("/", "/page/app.js", "/page/app.css", "/page/x")]

    index, script, style, nothing = asyncio.run(go())
    assert nothing.status_code == 404
    for reply in (index, script, style):
        assert reply.status_code == 200
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", reply.text)
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', index.text))
    assert named == {"data:,", "page/app.css", "page/app.js", "docs", "metrics"}
    assert "innerHTML" not in script.text


@needs_browser
@pytest.mark.parametrize("width", [1360, 390])
def test_a_conversation_by_keyboard_alone(tmp_path, width):
    call = (
        f'</think>\n\n<{DSML} calls>\n<{DSML} invoke name="weather">\n'
        f'<{DSML} parameter name="town" string="true">Oslo</{DSML} parameter>\n'
        f"</{DSML} invoke>\n</{DSML} calls>"
    )
    script = speaker(
        [
            Script([*steps("Let me think about it.</think>Hello, Ana! " + FORGED), [1]], cached=5),
            Script([*steps("I need the tool." + call), [1]]),
            Script([*steps("It rains.</think>In Oslo it rains."), [1]], cached=9),
        ]
    )
    with page(tmp_path, script, width=width) as (browser, engine):
        browser.until("document.activeElement.id === 'ask'")  # one may type at once
        ask(browser, "Hello")
        browser.until(ENDED)
        said = browser.text("#log")
        assert "Let me think about it." in browser.text(".reasoning")
        assert browser.text(".content") == f"Hello, Ana! {FORGED}"
        assert not browser.run("!!document.querySelector('#forged')")
        assert re.search(r"\d+ prompt tokens, 5 cached, \d+ out", said), said
        assert "USD" in said
        assert browser.focused() == "ask"
        # The tools are filled in and used without a mouse.
        if width == 390:
            browser.run("document.querySelector('#settings summary').focus()")
            browser.press("Enter")
        browser.tab_to("example")
        browser.press("Enter")
        assert "weather" in browser.run("document.querySelector('#tools').value")
        for _ in range(40):
            if browser.focused() == "ask":
                break
            browser.press("Tab", shift=True)
        ask(browser, "Weather in Oslo?")
        browser.until("document.querySelector('.call textarea')")
        assert browser.until("document.activeElement.id").startswith("result-")
        assert '"town": "Oslo"' in browser.text(".call pre") or "Oslo" in browser.text(".call pre")
        ask(browser, "rain, 7 degrees")
        browser.until("document.querySelectorAll('.assistant .content').length >= 2 && " + ENDED)
        assert "In Oslo it rains." in browser.text("#log")
        prompt = byte_codec().detokenize(engine.requests[-1].token_ids)
        assert "rain, 7 degrees" in prompt
        assert browser.focused() == "ask"
        # What is there of the server.
        assert "ready" in browser.text("#state")
        assert "prefill" in browser.text("#workers")
        assert "40/100" in browser.text("#workers")
        browser.until("/[1-9]\\d*%/.test(document.querySelector('#numbers').innerText)")
        assert narrow_enough(browser)
        shoot(browser, f"chat-{width}")
        if width == 390 and SHOTS:
            browser.run("document.querySelector('#live').scrollIntoView()")
            shoot(browser, f"live-{width}")
        assert browser.errors == []


@needs_browser
def test_escape_stops_an_answer_and_the_engine_hears_of_it(tmp_path):
    gate = asyncio.Event()  # never set
    script = Script([*steps("A long</think>story"), [1]], gates={2: gate})
    with page(tmp_path, script) as (browser, engine):
        ask(browser, "Tell me")
        browser.until("document.querySelector('.reasoning')")
        browser.press("Escape")
        browser.until("document.body.dataset.busy === 'no'")
        assert "stopped" in browser.text("#log")
        assert browser.run("document.querySelector('#trouble').hidden")
        browser.tab_to("send")
        while not engine.aborted:
            browser.run("1")
        assert engine.live == set()


@needs_browser
@pytest.mark.parametrize("width", [1360, 390])
def test_a_workers_death_is_told_and_the_message_can_be_sent_again(tmp_path, width):
    script = speaker(
        [
            Script(steps("Once</think>upon a"), raise_at=(2, EngineLost("the decode worker died"))),
            Script([], raise_at=(0, EngineUnavailable("no decode worker is ready"))),
            Script([*steps("Once</think>upon a time."), [1]]),
        ]
    )
    with page(tmp_path, script, width=width) as (browser, engine):
        dead = replace(WORKERS[1], ready=False, detail="went away; it is started again")
        engine.workers = [WORKERS[0], dead]
        browser.until("/not ready/.test(document.querySelector('#state').innerText)")
        assert "went away" in browser.text("#workers")
        ask(browser, "A story")
        browser.until("!document.querySelector('#trouble').hidden")
        told = browser.text("#trouble")
        assert "the decode worker died" in told
        assert "decode worker 127.0.0.1:7001" in told
        assert "Try again" in told
        assert "upon a" in browser.text("#log")  # what came is still there
        assert browser.focused() == "again"
        assert narrow_enough(browser)
        shoot(browser, f"death-{width}")
        browser.press("Enter")
        browser.until(
            "/no decode worker is ready/.test(document.querySelector('#trouble').innerText)"
        )
        engine.workers = list(WORKERS)
        browser.press("Enter")
        browser.until(ENDED + " && /upon a time/.test(document.querySelector('#log').innerText)")
        assert browser.run("document.querySelector('#trouble').hidden")
        prompts = [byte_codec().detokenize(r.token_ids) for r in engine.requests]
        assert prompts[0] == prompts[1] == prompts[2]


@needs_browser
def test_a_server_with_keys_says_so_and_takes_one(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ana:the-key-of-ana-01234\n")
    engine = FakeEngine(Script([*steps("Well</think>Hello"), [1]]))
    settings = Settings(api_key_file=keys)
    with serving(lambda: create_app(engine, byte_codec(), settings)) as server:
        browser = Page(tmp_path / "profile", 1360)
        try:
            browser.open(server.url + "/")
            browser.until("/API key/.test(document.querySelector('#trouble').innerText)")
            browser.tab_to("key")
            browser.type("the-key-of-ana-01234")
            browser.press("Tab")
            browser.until("document.querySelector('#model').value === 'toy'")
            browser.run("document.querySelector('#ask').focus()")
            ask(browser, "Hi")
            browser.until(ENDED)
            assert "Hello" in browser.text("#log")
        finally:
            browser.close()


def test_status_tells_what_the_page_shows(request_json):
    value = request_json(Script(), "GET", "/status").json()
    assert value["status"] == "ready"
    assert json.dumps(value["recent"])
    assert value["workers"][0]["running"] == 1
