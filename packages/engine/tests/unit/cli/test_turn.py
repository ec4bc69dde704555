"""One streamed answer in the terminal."""

from __future__ import annotations

import asyncio
import io

from rich.console import Console

from deepinfer_engine.cli.client import ChatSource
from deepinfer_engine.cli.turn import show_turn


def chunk(delta, finish=None, usage=None):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}


def show(chunks, clock):
    asked = []

    async def stream(body):
        asked.append(body)
        for one in chunks:
            yield one

    text = io.StringIO()
    turn = asyncio.run(
        show_turn(ChatSource("m", stream), {"model": "m"}, Console(file=text), clock)
    )
    return turn, text.getvalue(), asked[0]


def test_thinking_and_answer_are_shown_and_told_apart():
    usage = {"prompt_tokens": 300, "completion_tokens": 5, "prompt_cache_hit_tokens": 256}
    chunks = [
        chunk({"role": "assistant", "content": None}),
        chunk({"reasoning_content": "hm"}),
        chunk({"content": "four"}),
        chunk({"content": " [b]2[/b]"}, finish="length"),
        {"choices": [], "usage": usage},
    ]
    ticks = iter([0.0, 0.5, 2.5])
    turn, text, body = show(chunks, lambda: next(ticks))
    assert (turn.reasoning, turn.content, turn.finish) == ("hm", "four [b]2[/b]", "length")
    assert text == "hm\nfour [b]2[/b]\n"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert turn.summary() == (
        "300 prompt tokens (256 cached), 5 out, first after 500 ms, all in 2.50 s, ended by length"
    )


def test_an_empty_answer_has_no_time_to_first_token():
    turn, text, _ = show([chunk({"content": ""}, finish="stop")], lambda: 0.0)
    assert turn.ttft_s is None
    assert text == "\n"
    assert "first after" not in turn.summary()


def test_tool_calls_are_shown_as_they_come():
    calls = [
        chunk({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
    ]
    _, text, _ = show(calls, lambda: 0.0)
    assert text == "f{}\n"
