"""`deepinfer chat` over what a terminal or a pipe gives it."""

from __future__ import annotations

import io
from contextlib import asynccontextmanager

from deepinfer_engine.cli import chat
from deepinfer_engine.cli.client import ChatSource
from deepinfer_engine.settings import Settings


def test_a_line_that_is_not_utf8_is_left_out_and_the_conversation_goes_on(monkeypatch, capsys):
    asked = []

    @asynccontextmanager
    async def source(settings):
        async def stream(body):
            asked.append([turn["content"] for turn in body["messages"]])
            yield {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]}

        yield ChatSource("toy", stream)

    monkeypatch.setattr(chat, "local_source", source)
    typed = io.BytesIO(b"one\n\xff\xfe\n\ntwo\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed, encoding="utf-8", errors="strict"))
    assert chat.run_chat(Settings(), chat.ChatOptions()) == 0
    assert asked == [["one"], ["one", "yes", "two"]]
    assert "not UTF-8" in capsys.readouterr().err
