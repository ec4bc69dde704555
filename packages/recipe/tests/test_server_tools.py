"""Web searches that the server runs: in the stream, in the response, and in the next prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from deepinfer_recipe import (
    ConversionOptions,
    Exchange,
    RecipeError,
    ServerToolPolicy,
    WebSearchBehavior,
)

MODEL = "DeepSeek-V4.1-Flash"
RUN = ConversionOptions(
    responses_web_search=WebSearchBehavior.Run, messages_web_search=WebSearchBehavior.Run
)


def call(*queries: str, name: str = "web_search") -> str:
    invokes = "\n".join(
        f'<｜DSML｜ invoke name="{name}">\n<｜DSML｜ parameter name="query" string="true">{query}'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>"
        for query in queries
    )
    return f"\n\n<｜DSML｜ calls>\n{invokes}\n</｜DSML｜ calls>"


@dataclass
class Outcome:
    blocks_for_model: list[dict[str, Any]]
    wire_blocks: list[dict[str, Any]]
    usage: dict[str, int] = field(default_factory=lambda: {"web_search_requests": 1})


class Searcher:
    """A search that finds one page for every query, and remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], ServerToolPolicy]] = []

    async def run_tool(self, name: str, input: dict[str, Any], policy: ServerToolPolicy) -> Outcome:
        self.asked.append((name, input, policy))
        text = [{"type": "text", "text": f"Found: {input.get('query')}"}]
        if policy.dialect == "openai":
            action = {"type": "search", "query": input.get("query")}
            item = {"type": "web_search_call", "id": policy.tool_use_id}
            return Outcome(text, [{**item, "status": "completed", "action": action}])
        use = {"type": "server_tool_use", "id": policy.tool_use_id, "name": name, "input": input}
        hit = {"type": "web_search_result", "url": "https://x.test", "title": "X"}
        hit["encrypted_content"] = f"sealed {input.get('query')}"
        result = {"type": "web_search_tool_result", "tool_use_id": policy.tool_use_id}
        return Outcome(text, [use, {**result, "content": [hit]}])


def messages(**more: Any) -> Exchange:
    tool = {"type": "web_search_20250305", "name": "web_search", "allowed_domains": ["x.test"]}
    body = {
        "model": MODEL,
        "max_tokens": 99,
        "stream": True,
        "thinking": {"type": "enabled"},
        "messages": [{"role": "user", "content": "News?"}],
        "tools": [{**tool, **more.pop("tool", {})}],
        **more,
    }
    return Exchange("messages", body, id="msg_1", options=RUN)


def responses(**more: Any) -> Exchange:
    body = {"model": MODEL, "input": "News?", "stream": True, "tools": [{"type": "web_search"}]}
    return Exchange("responses", {**body, **more}, id="resp_1", created=0, options=RUN)


def run(exchange: Exchange, searcher: Searcher, *turns: str) -> list[str]:
    """Feed model turns, running the searches between them."""
    answer = exchange.answer
    frames: list[str] = []
    for number, text in enumerate(turns):
        assert not answer.finished
        frames += answer.ready(prompt_tokens=10, cached_tokens=4 * number)
        frames += answer.text(text, 5)
        frames += answer.finish()
        if answer.pending_calls:
            frames += asyncio.run(answer.run_server_tools(searcher.run_tool))
    return frames


def events(frames: list[str]) -> list[dict[str, Any]]:
    return [json.loads(frame.partition("data: ")[2]) for frame in frames]


ASK, TELL = "Hm.</think>I look." + call("voles"), "Now I know.</think>Voles!"


def test_messages_shows_use_result_and_answer_in_order() -> None:
    exchange, searcher = messages(), Searcher()
    frames = run(exchange, searcher, ASK, TELL)
    assert exchange.answer.finished
    done = exchange.response()
    kinds = [block["type"] for block in done["content"]]
    assert kinds == [
        "thinking", "text", "server_tool_use", "web_search_tool_result", "thinking", "text",
    ]  # fmt: skip
    use, result = done["content"][2:4]
    assert use["input"] == {"query": "voles"}
    assert result["tool_use_id"] == use["id"]
    assert result["content"][0]["encrypted_content"] == "sealed voles"
    assert done["stop_reason"] == "end_turn"
    assert done["usage"]["server_tool_use"] == {"web_search_requests": 1}
    assert done["usage"]["output_tokens"] == 10
    assert done["usage"]["input_tokens"] == 16
    assert done["usage"]["cache_read_input_tokens"] == 4
    told = events(frames)
    assert [e["type"] for e in told].count("message_start") == 1
    assert [e["index"] for e in told if e["type"] == "content_block_start"] == list(range(6))
    assert [e["index"] for e in told if e["type"] == "content_block_stop"] == list(range(6))
    assert told[-1]["type"] == "message_stop"


def test_responses_shows_the_call_as_an_item_with_its_events() -> None:
    exchange, searcher = responses(), Searcher()
    told = events(run(exchange, searcher, ASK, TELL))
    done = exchange.response()
    assert [item["type"] for item in done["output"]] == [
        "reasoning", "message", "web_search_call", "reasoning", "message",
    ]  # fmt: skip
    assert done["output"][2]["action"] == {"type": "search", "query": "voles"}
    assert done["status"] == "completed"
    assert done["usage"]["total_tokens"] == 30
    assert [e["sequence_number"] for e in told] == list(range(len(told)))
    kinds = [e["type"] for e in told if e.get("item_id", "").startswith("ws_")]
    assert kinds == [
        f"response.web_search_call.{s}" for s in ("in_progress", "searching", "completed")
    ]
    assert told[-1]["type"] == "response.completed"


@pytest.mark.parametrize("make", [messages, responses])
def test_the_next_prompt_continues_the_first_with_the_result(make: Any) -> None:
    exchange, searcher = make(), Searcher()
    first = exchange.prompt
    run(exchange, searcher, ASK)
    assert exchange.prompt.startswith(first + ASK)
    rest = exchange.prompt[len(first + ASK) :]
    result = "<tool_result>Found: voles</tool_result>"
    assert rest == f"<｜end▁of▁sentence｜><｜User｜>{result}<｜Assistant｜><think>"


def test_the_caller_is_told_what_the_client_allows() -> None:
    exchange, searcher = messages(tool={"max_uses": 3}), Searcher()
    run(exchange, searcher, "</think>" + call("a", "b"), "</think>" + call("c"))
    policies = [policy for _, _, policy in searcher.asked]
    assert [policy.uses for policy in policies] == [0, 1, 2]
    assert {policy.max_uses for policy in policies} == {3}
    assert policies[0].tool["allowed_domains"] == ["x.test"]
    assert len({policy.tool_use_id for policy in policies}) == 3
    assert [input for _, input, _ in searcher.asked] == [{"query": q} for q in "abc"]


def test_uses_beyond_the_limit_are_refused_and_a_stubborn_model_is_stopped() -> None:
    exchange, searcher = messages(tool={"max_uses": 1}), Searcher()
    run(exchange, searcher, "</think>" + call("a"), "</think>" + call("b"))
    assert "the limit of 1 is reached" in exchange.prompt
    assert not exchange.answer.finished
    frames = run(exchange, searcher, "</think>" + call("c"))
    assert len(searcher.asked) == 1
    assert exchange.answer.finished
    done = exchange.response()
    codes = [
        b["content"]["error_code"]
        for b in done["content"]
        if b["type"] == "web_search_tool_result" and isinstance(b["content"], dict)
    ]
    assert codes == ["max_uses_exceeded"] * 2
    assert done["stop_reason"] == "pause_turn"
    assert events(frames)[-1]["type"] == "message_stop"


def test_the_limit_of_responses_is_max_tool_calls() -> None:
    exchange, searcher = responses(max_tool_calls=1), Searcher()
    run(exchange, searcher, "</think>" + call("a", "b"), TELL)
    statuses = [
        i["status"] for i in exchange.response()["output"] if i["type"] == "web_search_call"
    ]
    assert statuses == ["completed", "failed"]
    with pytest.raises(RecipeError, match="max_tool_calls: expected a positive integer"):
        responses(max_tool_calls=0)
    with pytest.raises(RecipeError, match=r"tools\[0\].max_uses"):
        messages(tool={"max_uses": "3"})


def test_a_search_that_fails_is_told_and_the_answer_goes_on() -> None:
    async def broken(name: str, input: dict[str, Any], policy: ServerToolPolicy) -> Outcome:
        raise OSError("no network")

    exchange = messages()
    exchange.answer.text(ASK)
    exchange.answer.finish()
    asyncio.run(exchange.answer.run_server_tools(broken))
    assert "not available now" in exchange.prompt
    exchange.answer.text(TELL)
    exchange.answer.finish()
    result = exchange.response()["content"][3]
    assert result["content"] == {
        "type": "web_search_tool_result_error",
        "error_code": "unavailable",
    }


def test_calls_of_the_client_end_the_turn_behind_the_search() -> None:
    own = {"name": "f", "input_schema": {"type": "object"}}
    exchange, searcher = messages(), Searcher()
    body = {"tools": [{"type": "web_search_20250305", "name": "web_search"}, own]}
    exchange = messages(**body)
    text = "</think>" + call("voles").replace("\n</｜DSML｜ calls>", "")
    text += '\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    run(exchange, searcher, text)
    assert exchange.answer.finished
    done = exchange.response()
    assert done["stop_reason"] == "tool_use"
    kinds = [block["type"] for block in done["content"]]
    assert kinds == ["thinking", "tool_use", "server_tool_use", "web_search_tool_result"]
    # The whole of it comes back with the client's own result.
    use = done["content"][1]
    back = [
        {"role": "user", "content": "News?"},
        {"role": "assistant", "content": done["content"]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "mine"}],
        },
    ]
    second = messages(messages=back, **body)
    assert second.prompt.count("<tool_result>") == 2
    assert "X\nhttps://x.test" in second.prompt


def test_a_history_with_searches_renders_as_the_model_saw_it() -> None:
    exchange, searcher = messages(), Searcher()
    run(exchange, searcher, ASK, TELL)
    turns = [
        {"role": "user", "content": "News?"},
        {"role": "assistant", "content": exchange.response()["content"]},
        {"role": "user", "content": "More?"},
    ]

    def read(block: Mapping[str, Any]) -> str:
        return block["content"][0]["encrypted_content"].replace("sealed", "Found:")

    options = RUN.with_search_result_text(read)
    body = {
        "model": MODEL,
        "max_tokens": 9,
        "thinking": {"type": "enabled"},
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "messages": turns,
    }
    second = Exchange("messages", body, id="x", options=options)
    assert second.prompt.startswith(exchange.prompt + TELL)


def test_an_answer_cut_short_makes_no_search() -> None:
    for reason in ("length", "content_filter"):
        exchange = responses()
        exchange.answer.text(ASK[:-20])
        exchange.answer.finish(reason)  # type: ignore[arg-type]
        assert exchange.answer.finished
        assert exchange.answer.pending_calls == []
        assert exchange.response()["status"] == "incomplete"


def test_search_blocks_that_do_not_match_are_named() -> None:
    use = {"type": "server_tool_use", "id": "w", "name": "web_search", "input": {"query": "x"}}
    result = {"type": "web_search_tool_result", "tool_use_id": "w", "content": []}
    for blocks, told in [
        ([use], "no `web_search_tool_result`"),
        ([result], r"content\[0\].tool_use_id"),
        ([use, result, result], r"content\[2\].tool_use_id"),
        ([{**use, "id": 3}], r"valid string, got 3 \(at messages\[1\].content\[0\].id\)"),
    ]:
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": blocks}]
        with pytest.raises(RecipeError, match=told):
            messages(messages=[*turns, {"role": "user", "content": "y"}])


def test_a_search_may_be_forced_where_nothing_is_thought() -> None:
    exchange = responses(tool_choice={"type": "web_search"}, reasoning={"effort": "none"})
    assert exchange.prompt.endswith("<｜DSML｜ calls>\n")
    searcher = Searcher()
    run(exchange, searcher, call("voles").split("calls>\n", 1)[1])
    assert searcher.asked
    assert not exchange.prompt.endswith("calls>\n")


def test_other_tools_and_parity_are_as_before() -> None:
    with pytest.raises(RecipeError, match=r"tools\[0\].type: a tool of type `web_fetch_20250910`"):
        messages(tools=[{"type": "web_fetch_20250910", "name": "web_fetch"}])
    body = {"model": MODEL, "input": "x", "tools": [{"type": "web_search"}]}
    parity = Exchange("responses", body, id="x", options=RUN, profile="parity")
    assert parity.request.conversation.tools == []
