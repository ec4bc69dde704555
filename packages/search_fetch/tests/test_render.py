"""Rendering in a real headless Chromium, and the guard around everything it may load."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_search_fetch import (
    AsyncSearchFetch,
    Config,
    ContentError,
    FetchRequest,
    FetchResponse,
    InvalidRequestError,
    RefusedError,
    SearchFetchError,
)
from deepinfer_search_fetch.extract.scripted import wants_rendering
from deepinfer_search_fetch.render.chromium import (
    ChromiumRenderer,
    find_chromium,
    group_members,
)
from deepinfer_search_fetch.render.snapshot import flatten

Listener = Any  # see conftest
MakeClient = Callable[..., AsyncSearchFetch]
WORDS = "The heron stands still in the shallow water and waits for fish. "

# The rest of the browser's tests take a minute: nox -s render runs them too.
slow = pytest.mark.slow
needs_chromium = pytest.mark.skipif(
    find_chromium(None) is None, reason="no Chromium on this machine: rendering is not tested"
)


@pytest.fixture
def render_config(config: Config) -> Config:
    user = "nobody" if os.geteuid() == 0 else None
    return config.model_copy(update={"render_user": user, "render_seconds": 30.0})


def fetch(
    client: AsyncSearchFetch, site: Listener, path: str = "/", **fields: Any
) -> FetchResponse:
    async def run() -> FetchResponse:
        request = FetchRequest(url=f"http://public.test:{site.port}{path}", **fields)
        try:
            return await client.fetch(request)
        finally:
            await client.fetcher._renderer.close()

    return asyncio.run(run())


def script_page(script: str) -> str:
    return f"<html><head><title>App</title></head><body><div id=root></div><script>{script}</script></body></html>"  # noqa: E501


APP = script_page(
    """
    fetch('/data.json').then(r => r.json()).then(d => {
      root.innerHTML = '<h1>Herons</h1><p>' + d.text.repeat(6) + '</p><img src=/heron.png>';
    });
    """
)


@needs_chromium
def test_a_page_drawn_by_script_is_rendered_when_asked_or_when_it_looks_so(
    render_config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", APP)
    site.page("/data.json", f'{{"text": "{WORDS}"}}', content_type="application/json")
    client = make_client(render_config)
    response = fetch(client, site)
    assert response.content.count("heron stands still") == 6
    assert response.extraction.rendered
    # The page itself came once, and its picture not at all (the browser asks for the icon itself).
    asked = set(site.paths())
    assert asked - {"/favicon.ico"} == {"/", "/data.json"}
    assert site.paths().count("/") == 1
    again = fetch(client, site)
    assert (again.cache.hit, again.content) == (True, response.content)
    assert site.paths().count("/data.json") == 1
    with pytest.raises(ContentError, match="no readable text"):
        fetch(client, site, render="never")


@slow
@needs_chromium
def test_an_ordinary_page_is_not_rendered_unless_asked(
    render_config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", f"<h1>Heron</h1><p>{WORDS * 6}</p><script>document.title='x'</script>")
    client = make_client(render_config)
    assert not fetch(client, site).extraction.rendered
    forced = fetch(client, site, render="always")
    assert forced.extraction.rendered
    assert "heron stands still" in forced.content


@slow
@needs_chromium
def test_shadow_roots_slots_and_same_origin_frames_become_text(
    render_config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/frame", f"<p>Framed: {WORDS * 3}</p>")
    site.page(
        "/",
        script_page(
            """
            customElements.define('x-card', class extends HTMLElement {
              connectedCallback() {
                this.attachShadow({mode: 'closed'}).innerHTML =
                  '<section><h2><slot name=head>none</slot></h2><slot></slot></section>';
              }
            });
            root.innerHTML = '<details open><summary>Opened</summary>Detail text</details>'
              + '<x-card><span slot=head>Slotted heading</span><p>Light: %s</p></x-card>'
              + '<iframe src=/frame></iframe>';
            """
            % (WORDS * 3)
        ),
    )
    content = fetch(make_client(render_config), site, render="always", mode="full").content
    assert "## Slotted heading" in content
    assert content.index("Slotted heading") < content.index("Light: The heron")
    assert "Framed: The heron" in content
    assert "Opened" in content
    assert "Detail text" in content
    assert "none" not in content


@slow
@needs_chromium
@pytest.mark.parametrize("wait_for", ["#late", 1500])
def test_wait_for_outlasts_an_idle_network(
    wait_for: str | int, render_config: Config, site: Listener, make_client: MakeClient
) -> None:
    script = "setTimeout(() => { root.innerHTML = '<p id=late>' + %r + '</p>' }, 1200)"
    site.page("/", script_page(script % (WORDS * 6)))
    response = fetch(make_client(render_config), site, wait_for=wait_for)
    assert "heron stands still" in response.content


@slow
@needs_chromium
def test_a_wrong_selector_is_the_callers_fault(
    render_config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", APP)
    with pytest.raises(InvalidRequestError):
        fetch(make_client(render_config), site, wait_for="p[[")


@slow
@needs_chromium
@pytest.mark.parametrize("kind", ["spins", "grows"])
def test_a_page_that_runs_away_is_killed_and_the_next_one_works(
    kind: str, render_config: Config, site: Listener, make_client: MakeClient
) -> None:
    grow = "const a = []; setInterval(() => a.push(new Uint8Array(3e7).fill(1)), 20)"
    site.page("/bad", script_page("while (true);" if kind == "spins" else grow))
    site.page("/", APP)
    site.page("/data.json", f'{{"text": "{WORDS}"}}', content_type="application/json")
    config = render_config.model_copy(
        update={
            "render_seconds": 2.0 if kind == "spins" else 30.0,
            "render_memory_bytes": 500_000_000,
        }
    )
    client = make_client(config)
    with pytest.raises(SearchFetchError) as caught:
        fetch(client, site, "/bad", render="always", wait_for="#never")
    assert caught.value.code == ("timeout" if kind == "spins" else "response_too_large")
    assert "heron" in fetch(client, site).content


@slow
@needs_chromium
def test_nothing_of_the_browser_is_left_after_close(
    render_config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", APP)
    client = make_client(render_config)
    seen: list[int] = []

    async def run() -> None:
        request = FetchRequest(url=f"http://public.test:{site.port}/", render="always", mode="full")
        with pytest.raises(ContentError):
            await client.fetch(request)
        browser = client.fetcher._renderer._idle[0]
        seen.append(browser._process.pid)
        folder = browser._folder
        await client.close()
        assert not folder.exists()

    asyncio.run(run())
    assert group_members(seen[0]) == []


ESCAPES = """
  const t = 'http://127.0.0.1:TCP', out = [];
  const say = () => { root.innerHTML = '<p>' + WORDS.repeat(6) + '</p>'; };
  const WORDS = 'The heron tried every door. ';
  fetch(t + '/fetch').catch(() => 0);
  fetch(t + '/nocors', {mode: 'no-cors'}).catch(() => 0);
  fetch('http://localhost:TCP/localhost', {mode: 'no-cors'}).catch(() => 0);
  fetch('http://[::1]:TCP/six', {mode: 'no-cors'}).catch(() => 0);
  fetch('http://rebind.test:TCP/name', {mode: 'no-cors'}).catch(() => 0);
  new Image().src = t + '/img';
  const x = new XMLHttpRequest(); x.open('GET', t + '/xhr'); x.onerror = () => 0; x.send();
  for (const tag of ['iframe', 'embed', 'object', 'audio', 'video', 'source', 'script']) {
    const e = document.createElement(tag);
    e[tag === 'object' ? 'data' : 'src'] = t + '/' + tag; document.body.append(e);
  }
  const meta = document.createElement('iframe'); meta.src = 'http://169.254.169.254/latest/';
  document.body.append(meta);
  const file = document.createElement('iframe'); file.src = 'file:///etc/passwd';
  document.body.append(file);
  const inner = document.createElement('iframe');
  inner.srcdoc = '<img src=' + t + '/inner><script>fetch("' + t + '/inner2")<' + '/script>';
  document.body.append(inner);
  for (const rel of ['stylesheet', 'preload', 'prefetch', 'prerender', 'preconnect', 'dns-prefetch',
                     'modulepreload', 'manifest', 'icon']) {
    const l = document.createElement('link'); l.rel = rel; l.href = t + '/' + rel;
    if (rel === 'preload') l.as = 'fetch';
    document.head.append(l);
  }
  const style = document.createElement('style');
  style.textContent = 'body{background:url(' + t + '/css)} @import url(' + t + '/import);'
    + '@font-face{font-family:f;src:url(' + t + '/font)} p{font-family:f}';
  document.head.append(style);
  try { new WebSocket('ws://127.0.0.1:TCP/ws'); } catch (e) {}
  try { new EventSource(t + '/events'); } catch (e) {}
  navigator.sendBeacon(t + '/beacon', 'x');
  const code = "fetch('" + t + "/worker', {mode:'no-cors'}).catch(()=>0);"
    + "try { importScripts('" + t + "/imported') } catch (e) {}"
    + "try { new WebSocket('ws://127.0.0.1:TCP/workerws') } catch (e) {}";
  new Worker(URL.createObjectURL(new Blob([code])));
  try { new SharedWorker(URL.createObjectURL(new Blob([code]))); } catch (e) {}
  try { navigator.serviceWorker.register('/sw.js'); } catch (e) {}
  import(t + '/module').catch(() => 0);
  const form = document.createElement('form'); form.action = t + '/form'; form.target = 'f';
  form.method = 'POST'; document.body.append(form); form.submit();
  window.open(t + '/popup');
  const frame = document.createElement('iframe'); document.body.append(frame);
  for (const scope of [window, frame.contentWindow]) {
    try {
      const rtc = new scope.RTCPeerConnection({iceServers: [
        {urls: 'stun:127.0.0.1:UDP'},
        {urls: 'turn:127.0.0.1:TCP?transport=tcp', username: 'u', credential: 'c'}]});
      rtc.createDataChannel('d');
      rtc.createOffer().then(o => rtc.setLocalDescription(o));
    } catch (e) {}
    try { new scope.WebTransport('https://127.0.0.1:UDP/'); } catch (e) {}
  }
  setTimeout(say, 800);
"""


@needs_chromium
def test_rows_57_and_59_no_door_of_a_rendered_page_leads_to_a_private_service(
    render_config: Config, site: Listener, target: Listener, make_client: MakeClient
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        script = ESCAPES.replace("TCP", str(target.port)).replace("UDP", str(udp.getsockname()[1]))
        site.page("/", script_page(script))
        site.page("/sw.js", "0", content_type="text/javascript")
        config = render_config.model_copy(
            update={"ports": (*render_config.ports, target.port), "render_seconds": 30.0}
        )
        client = make_client(config, {"rebind.test": [["127.0.0.1"]]})
        response = fetch(client, site, render="always", mode="full", wait_for=3000)
        assert "tried every door" in response.content
        assert any(w.startswith("render_requests_refused") for w in response.extraction.warnings)
        with pytest.raises(BlockingIOError):
            udp.recv(1)
    assert "/sw.js" not in site.paths()
    assert "root:" not in response.content


@needs_chromium
def test_row_58_a_name_that_rebinds_after_the_page_has_loaded_is_refused(
    render_config: Config, site: Listener, target: Listener, make_client: MakeClient
) -> None:
    script = (
        f"fetch('http://rebind.test:{target.port}/x', {{mode: 'no-cors'}})"
        f".catch(() => 0).then(() => {{ root.innerHTML = '<p>' + {WORDS!r}.repeat(6) }})"
    )
    site.page("/", script_page(script))
    config = render_config.model_copy(update={"ports": (*render_config.ports, target.port)})
    table = {"rebind.test": [["127.0.0.2"], ["127.0.0.1"]]}
    client = make_client(config, table)
    response = asyncio.run(
        _with_renderer(client, f"http://rebind.test:{site.port}/", render="always", mode="full")
    )
    assert "heron" in response.content


async def _with_renderer(client: AsyncSearchFetch, url: str, **fields: Any) -> FetchResponse:
    try:
        return await client.fetch(FetchRequest(url=url, **fields))
    finally:
        await client.fetcher._renderer.close()


@slow
@needs_chromium
def test_row_57_a_page_cannot_navigate_to_a_private_place(
    render_config: Config, site: Listener, target: Listener, make_client: MakeClient
) -> None:
    ways = ("location.href = X", "document.write('<meta http-equiv=refresh content=0;url=' + X)")
    places = (f"http://127.0.0.1:{target.port}/", f"http://rebind.test:{target.port}/",
              "http://169.254.169.254/", "file:///etc/passwd", "data:text/html,hello")  # fmt: skip
    config = render_config.model_copy(update={"ports": (*render_config.ports, target.port)})
    client = make_client(config, {"rebind.test": [["127.0.0.1"]]})
    pages = [f"const X = '{place}'; setTimeout(() => {{ {way} }}, 50)"
             for place in places for way in ways]  # fmt: skip
    for i, script in enumerate(pages):
        site.page(f"/{i}", script_page(script))
    allowed = {"blocked_address", "blocked_scheme", "extraction_empty"}

    async def run() -> None:
        for i, script in enumerate(pages):
            url = f"http://public.test:{site.port}/{i}"
            with pytest.raises(SearchFetchError) as caught:
                await client.fetch(FetchRequest(url=url, render="always", mode="full"))
            assert caught.value.code in allowed, (script, caught.value.code)
        await client.close()

    asyncio.run(run())


@slow
@needs_chromium
def test_domain_lists_hold_for_navigation_by_script(
    render_config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", script_page(f"location.href = 'http://other.test:{site.port}/x'"))
    site.page("/x", f"<p>{WORDS * 6}")
    client = make_client(render_config, {"other.test": [["127.0.0.2"]]})

    async def run() -> None:
        try:
            await client.fetch(
                FetchRequest(url=f"http://public.test:{site.port}/", render="always"),
                allowed_domains=["public.test"],
            )
        finally:
            await client.fetcher._renderer.close()

    with pytest.raises(RefusedError) as caught:
        asyncio.run(run())
    assert caught.value.code == "forbidden"
    assert site.paths() == ["/"]
    moved = fetch(client, site, render="always")
    assert moved.final_url == f"http://other.test:{site.port}/x"


@slow
@needs_chromium
def test_a_page_cannot_download_more_than_its_budget(
    render_config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", script_page(
        "(async () => { for (let i = 0; i < 9; i++) { try { await fetch('/big?' + i) } catch {} }"
        f" root.innerHTML = '<p>' + {WORDS!r}.repeat(6) }})()"
    ))  # fmt: skip
    for i in range(9):
        site.page(f"/big?{i}", b"x" * 400_000, content_type="text/plain")
    config = render_config.model_copy(update={"render_bytes": 1_000_000})
    response = fetch(make_client(config), site, render="always", mode="full")
    assert "render_byte_limit" in response.extraction.warnings
    assert len(site.requests) <= 4 + 9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chromium": Path("/no/such/browser")}, "no Chromium"),
        ({"render_workers": 0}, "rendering off"),
        ({"chromium": Path("/bin/true"), "render_user": "no-such-user"}, "not an account"),
        ({"chromium": Path("/bin/true"), "render_user": "root"}, "must not be root"),
    ],
)
def test_without_a_renderer_the_feature_is_unavailable_and_says_why(
    change: dict[str, Any], words: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", APP)
    client = make_client(config.model_copy(update=change))
    for fields in ({"render": "always"}, {"wait_for": 10}):
        with pytest.raises(ContentError, match=words) as caught:
            fetch(client, site, **fields)
        assert caught.value.code == "feature_unavailable"
    with pytest.raises(ContentError, match="no readable text"):
        fetch(client, site)


def test_as_root_the_browser_needs_an_unprivileged_account(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with_browser = config.model_copy(update={"chromium": Path("/bin/true")})
    renderer = ChromiumRenderer(with_browser, None)  # type: ignore[arg-type]
    assert "does not run as root" in (renderer.problem() or "")
    named = with_browser.model_copy(update={"render_user": "nobody"})
    assert ChromiumRenderer(named, None).problem() is None  # type: ignore[arg-type]


def test_a_browser_that_does_not_start_is_a_clear_error(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", APP)
    user = "nobody" if os.geteuid() == 0 else None
    broken = config.model_copy(update={"chromium": Path("/bin/false"), "render_user": user})
    with pytest.raises(ContentError, match="does not start"):
        fetch(make_client(broken), site, render="always")


@pytest.mark.parametrize(
    ("html", "chars", "wanted"),
    [
        ("<div id=root></div><script>x</script>", 0, True),
        ("<div id=root></div><script>x</script>", 500, False),
        ("<div id=root></div>", 0, False),
        ("<body><script src=x></script></body>", 0, True),
        ("<body><p>short</p><script>" + "x" * 900 + "</script></body>", 5, True),
        ("<body><p>a short page</p><script>x</script></body>", 12, False),
        ("<p>x</p><noscript>Please enable JavaScript.</noscript><script>1</script>", 1, True),
        ("<p>x</p><noscript><img src=x></noscript><script>1</script>", 1, False),
    ],
)
def test_the_rule_of_automatic_rendering(html: str, chars: int, wanted: bool) -> None:
    assert wants_rendering(html.encode(), None, chars) is wanted


def test_a_tree_of_any_depth_is_flattened_and_a_wide_one_is_cut() -> None:
    depth = 50_000
    strings = ["#document", "DIV", "#text", "deep"]
    nodes = {
        "parentIndex": [-1, *range(depth), depth],
        "nodeType": [9] + [1] * depth + [3],
        "nodeName": [0] + [1] * depth + [2],
        "nodeValue": [-1] * (depth + 1) + [3],
        "attributes": [[] for _ in range(depth + 2)],
    }
    html, cut = flatten({"documents": [{"nodes": nodes}], "strings": strings})
    assert html.count("<div>") == html.count("</div>") == depth
    assert "deep" in html
    assert not cut
    wide = 400_000
    nodes = {
        "parentIndex": [-1] + [0] * wide,
        "nodeType": [9] + [1] * wide,
        "nodeName": [0] + [1] * wide,
        "nodeValue": [-1] * (wide + 1),
        "attributes": [[] for _ in range(wide + 1)],
    }
    html, cut = flatten({"documents": [{"nodes": nodes}], "strings": strings})
    assert cut
    assert html.count("<div>") < 300_001
