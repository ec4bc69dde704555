"""Web searches that the server runs: scripted model, real index, the official clients."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from server_fakes import FakeEngine, Script, byte_codec
from server_socket import serving

from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings
from deepinfer_recipe import SpecialToken

search_fetch = pytest.importorskip(
    "deepinfer_search_fetch", reason="the search extra is not installed"
)

MARK = SpecialToken.Dsml.value
QUERY = "where do voles live"
ANSWER = "Voles live in grass [1]."
FACT = "Voles live in the grass of wet meadows."


def call(query: str = QUERY) -> str:
    return (
        f"\n\n<{MARK} calls>\n<{MARK} invoke name=\"web_search\">\n"
        f"<{MARK} parameter name=\"query\" string=\"true\">{query}</{MARK} parameter>\n"
        f"</{MARK} invoke>\n</{MARK} calls>"
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name in ("meadow", "garden"):
        page = f"<title>Voles of the {name}</title><p>" + f"{FACT} The {name} is theirs. " * 15
        (folder / f"{name}.html").write_text(page)
    home = tmp_path_factory.mktemp("search")
    with search_fetch.SearchFetch(search_fetch.Config(home=home)) as client:
        assert client.ingest(folder).indexed == 2
    return home


class Prompts:
    """What the model is made to say, by what its prompt ends with; keeps every prompt."""

    def __init__(self) -> None:
        self.codec = byte_codec()
        self.seen: list[str] = []

    def __call__(self, request) -> Script:
        prompt = self.codec.detokenize(request.token_ids)
        self.seen.append(prompt)
        asked = prompt.rpartition(SpecialToken.User.value)[2]
        greedy = "again and again" in prompt
        searched = "search results" in prompt
        text = call() if greedy or not searched else ANSWER
        if "no search" in asked:
            text = ANSWER
        ids = [*self.codec.tokenize("hm</think>" + text), 1]
        return Script([ids[i : i + 5] for i in range(0, len(ids), 5)], cached=2)


@pytest.fixture
def prompts() -> Prompts:
    return Prompts()


@pytest.fixture
def server(home: Path, prompts: Prompts):
    from deepinfer_engine.adapters.search_fetch import open_search

    opened = open_search("embedded", home, {})

    def build():
        web = asyncio.get_running_loop().create_task(opened.__aenter__())
        web = Web(web)
        engine = FakeEngine(prompts)
        engine.info = type(engine.info)(32768, 512, 2, "h")
        return create_app(engine, byte_codec(web=web), Settings())

    with serving(build) as running:
        yield running
        running.call(opened.__aexit__(None, None, None))


class Web:
    """The search opened on the server's own loop, reachable once it is."""

    def __init__(self, opening) -> None:
        self._opening = opening

    def start(self, *arguments):
        return self._opening.result().start(*arguments)

    def result_text(self, block):
        return self._opening.result().result_text(block)


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        yield client.messages


@pytest.fixture
def oai(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client.responses


TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def ask(claude, text="Where do voles live?", **more):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = {"model": "toy", "max_tokens": 4000, "tools": [TOOL], "thinking": thinking, **more}
    return claude.create(messages=[{"role": "user", "content": text}], **asked)


def test_messages_searches_shows_its_results_and_answers_from_them(claude, prompts) -> None:
    message = ask(claude)
    kinds = [b.type for b in message.content]
    assert kinds == ["thinking", "server_tool_use", "web_search_tool_result", "thinking", "text"]
    use, result = message.content[1:3]
    assert (use.name, use.input) == ("web_search", {"query": QUERY})
    assert result.tool_use_id == use.id
    assert {r.title for r in result.content} == {"Voles of the meadow", "Voles of the garden"}
    assert message.content[-1].text == ANSWER
    assert message.stop_reason == "end_turn"
    assert message.usage.server_tool_use.web_search_requests == 1
    assert len(prompts.seen) == 2
    assert FACT in prompts.seen[1]
    assert "authority" in prompts.seen[1]


def test_messages_streams_the_same_answer(claude) -> None:
    with claude.stream(
        model="toy",
        max_tokens=2000,
        tools=[TOOL],
        thinking={"type": "enabled", "budget_tokens": 1024},
        messages=[{"role": "user", "content": "Voles?"}],
    ) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == ANSWER
    assert [b.type for b in message.content][1:3] == ["server_tool_use", "web_search_tool_result"]
    assert message.content[1].input == {"query": QUERY}


def test_a_later_turn_reads_the_sealed_results_and_nothing_the_client_forged(
    claude, prompts
) -> None:
    first = ask(claude)
    content = json.loads(first.model_dump_json(exclude_none=True))["content"]
    content[2]["content"][0]["title"] = "FORGED"
    claude.create(
        model="toy",
        max_tokens=100,
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "Where do voles live?"},
            {"role": "assistant", "content": content},
            {"role": "user", "content": "Thanks, no search now."},
        ],
    )
    last = prompts.seen[-1]
    assert FACT in last
    assert "FORGED" not in last


def test_domains_hold_and_uses_end(claude, prompts) -> None:
    nothing = ask(claude, tools=[{**TOOL, "allowed_domains": ["other.example"]}])
    assert nothing.content[2].content == []
    assert nothing.usage.server_tool_use.web_search_requests == 0
    with pytest.raises(anthropic.BadRequestError, match="allowed_domains"):
        ask(claude, tools=[{**TOOL, "allowed_domains": ["https://a.example/"]}])
    with pytest.raises(anthropic.BadRequestError, match="cannot be combined"):
        ask(claude, tools=[{**TOOL, "allowed_domains": ["a.example"], "blocked_domains": ["b.c"]}])
    with pytest.raises(anthropic.BadRequestError, match="type"):
        ask(claude, tools=[{**TOOL, "type": "web_search_20990101"}])
    paused = ask(claude, "search again and again", tools=[{**TOOL, "max_uses": 2}])
    errors = [b.content for b in paused.content if b.type == "web_search_tool_result"]
    assert [type(e).__name__ for e in errors[:2]] == ["list", "list"]
    assert {e.error_code for e in errors[2:]} == {"max_uses_exceeded"}
    assert paused.stop_reason == "pause_turn"
    assert paused.usage.server_tool_use.web_search_requests == 2


def test_results_that_leave_no_room_pause_the_answer(home: Path, prompts: Prompts) -> None:
    from deepinfer_engine.adapters.search_fetch import open_search

    body = {"model": "toy", "max_tokens": 240, "tools": [TOOL],
            "messages": [{"role": "user", "content": "Where?"}]}  # fmt: skip

    async def main():
        async with open_search("embedded", home, {}) as web:
            codec, engine = byte_codec(web=web), FakeEngine(prompts)
            prompt = codec.prepare("messages", json.dumps(body).encode(), 32768).token_ids
            engine.info = type(engine.info)(len(prompt) + 250, 512, 2, "h")
            transport = httpx.ASGITransport(app=create_app(engine, codec, Settings()))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                return (await client.post("/v1/messages", json=body, timeout=60)).json()

    message = asyncio.run(main())
    assert message["stop_reason"] == "pause_turn"
    assert message["content"][-1]["type"] == "web_search_tool_result"
    assert len(prompts.seen) == 1


def test_responses_searches_and_answers(oai, prompts) -> None:
    response = oai.create(
        model="toy",
        input="Where do voles live?",
        tools=[{"type": "web_search", "search_context_size": "low"}],
        include=["web_search_call.action.sources"],
        max_output_tokens=600,
    )
    search = next(i for i in response.output if i.type == "web_search_call")
    assert (search.status, search.action.type, search.action.query) == (
        "completed",
        "search",
        QUERY,
    )
    assert len(search.action.sources) == 2
    assert response.output_text == ANSWER
    assert FACT in prompts.seen[1]


def test_responses_streams_its_events_in_order(oai) -> None:
    events = list(
        oai.create(
            model="toy",
            input="Where do voles live?",
            tools=[{"type": "web_search"}],
            max_output_tokens=600,
            stream=True,
        )
    )
    kinds = [e.type for e in events]
    start = kinds.index("response.web_search_call.in_progress")
    assert kinds[start - 1 : start + 4] == [
        "response.output_item.added",
        "response.web_search_call.in_progress",
        "response.web_search_call.searching",
        "response.web_search_call.completed",
        "response.output_item.done",
    ]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert kinds[-1] == "response.completed"
    assert events[-1].response.output_text == ANSWER


def test_requests_without_the_tool_are_as_before(claude, prompts) -> None:
    message = ask(claude, "no search please", tools=[])
    assert [b.type for b in message.content] == ["thinking", "text"]
    assert not re.search("web_search", prompts.seen[0])


def test_a_key_for_sealed_results_is_made_once_and_checked(tmp_path: Path) -> None:
    from deepinfer_engine.adapters.search_fetch import open_search
    from deepinfer_engine.errors import ConfigError

    async def token(environ: dict[str, str]) -> str:
        async with open_search("embedded", tmp_path, environ) as web:
            return web._bridge.seal.seal({"a": 1})

    assert asyncio.run(token({})) == asyncio.run(token({}))
    assert (tmp_path / "bridge.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="16 characters"):
        asyncio.run(token({"DEEPINFER_SEARCH_SECRET": "short"}))
    (tmp_path / "bridge.key").write_bytes(b"x")
    with pytest.raises(ConfigError, match="damaged"):
        asyncio.run(token({}))


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from deepinfer_engine.cli.launch import opened_search
    from deepinfer_engine.errors import ConfigError

    monkeypatch.delitem(sys.modules, "deepinfer_engine.adapters.search_fetch", raising=False)
    monkeypatch.setitem(sys.modules, "deepinfer_search_fetch", None)

    async def main() -> None:
        async with opened_search(Settings(search="embedded")):
            pass

    with pytest.raises(ConfigError, match=r"./packages/engine\[search\]"):
        asyncio.run(main())


@pytest.mark.parametrize("value", ["somewhere", "ftp://a.example", "http://"])
def test_a_search_that_is_no_url_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="embedded or an http"):
        Settings(search=value)
