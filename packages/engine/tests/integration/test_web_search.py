"""A real server that searches: the embedded model made to call the tool, a real index, clients."""

from __future__ import annotations

import subprocess
import sys

import anthropic
import pytest

search_fetch = pytest.importorskip(
    "deepinfer_search_fetch", reason="the search extra is not installed"
)
pytest.importorskip("xgrammar", reason="the grammar extra is not installed")

ASKED = {
    "model": "deepinfer-demo",
    "max_tokens": 300,
    "thinking": {"type": "disabled"},
    "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}],
    "tool_choice": {"type": "tool", "name": "web_search"},
    "messages": [{"role": "user", "content": "Where is the lamp kept?"}],
}


@pytest.fixture(scope="module", params=["embedded", "service"])
def url(request, tmp_path_factory, running_server):
    home = tmp_path_factory.mktemp("search")
    with search_fetch.SearchFetch(search_fetch.Config(home=home)) as client:
        page = tmp_path_factory.mktemp("pages") / "lamp.html"
        page.write_text("<title>The lamp</title><p>" + "The lamp is in the garden. " * 20)
        client.ingest(page)
    if request.param == "embedded":
        argv = ("--search", "embedded", "--search-home", str(home))
        with running_server("--single-process", *argv, cache_dir=None) as one:
            yield one.url
        return
    command = [sys.executable, "-m", "deepinfer_search_fetch.cli", "serve", "--no-auth"]
    service = subprocess.Popen(
        [*command, "--port", "0", "--home", str(home)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert service.stderr is not None
        where = next(line for line in service.stderr if " serves on " in line).split()[-1]
        with running_server("--single-process", "--search", where, cache_dir=None) as one:
            yield one.url
    finally:
        service.terminate()
        service.communicate()


def test_the_model_s_search_is_run_and_the_answer_goes_on(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0, timeout=180) as client:
        whole = client.messages.create(**ASKED)
        with client.messages.stream(**ASKED) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        kinds = [b.type for b in message.content]
        assert kinds[:2] == ["server_tool_use", "web_search_tool_result"]
        assert message.content[0].name == "web_search"
        assert isinstance(message.content[1].content, list)
        # The small model may call on, a tool that nobody declared even; the answer is whole.
        assert message.stop_reason in ("end_turn", "max_tokens", "pause_turn", "tool_use"), message
        assert message.usage.output_tokens > 0
