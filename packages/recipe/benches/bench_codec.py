"""Speed of the codec beside the reference package, same work, same run, one thread.

    python packages/recipe/benches/bench_codec.py [seconds per line]

The reference (`pip install deepseek-recipe==0.2.0`) is optional: without it the rates stand
alone. Rates are per second of processor time of this process; the last column is ours / theirs.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

THINKING = "We need to think about it. The town is known, the day is not; let me see.\n"
ANSWER = "Here is a line of the answer, with a comparison a < b and some `code`.\n"
CALL = (
    "\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="get_forecast">\n'
    '<｜DSML｜ parameter name="town" string="true">Oslo</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def tools(count: int, salt: str) -> list[dict[str, Any]]:
    properties = {
        f"field_{n}": {"type": "string", "description": f"Field number {n} of the tool. " * 3}
        for n in range(8)
    }
    schema = {"type": "object", "properties": properties, "required": ["field_0"]}
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{n}",
                "description": f"Tool {n} {salt}. " + "It does a thing. " * 8,
                "parameters": schema,
            },
        }
        for n in range(count)
    ]


def conversation_body(salt: str) -> bytes:
    """A ten-turn tool conversation of about 49 KB with twelve tools."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief. " * 40}]
    for turn in range(10):
        call = {
            "id": f"c{turn}",
            "type": "function",
            "function": {"name": "tool_1", "arguments": json.dumps({"field_0": "x" * 200})},
        }
        messages += [
            {"role": "user", "content": f"Question {turn}. " + "Some words of it. " * 12},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Hm. " * 60,
                "tool_calls": [call],
            },
            {"role": "tool", "tool_call_id": f"c{turn}", "content": "A result line.\n" * 60},
            {"role": "assistant", "content": "An answer. " * 20, "reasoning_content": "So. " * 40},
        ]
    messages.append({"role": "user", "content": "And now?"})
    body = {"model": "DeepSeek-V4.1-Flash", "messages": messages, "tools": tools(12, salt)}
    return json.dumps(body).encode()


def answer_text(size: int) -> str:
    half = size // 2
    thinking = THINKING * (half // len(THINKING))
    content = ANSWER * (half // len(ANSWER))
    return f"{thinking}</think>\n\n{content}{CALL}"


def pieces(text: str, low: int, high: int) -> list[str]:
    rng = random.Random(7)
    out: list[str] = []
    position = 0
    while position < len(text):
        step = rng.randint(low, high)
        out.append(text[position : position + step])
        position += step
    return out


def render(codec: ModuleType, body: bytes | dict[str, Any]) -> None:
    request = codec.ChatCompletionRequest(body).convert(codec.ConversionOptions())
    codec.DeepseekV41Encoding().render_conversation(request.conversation)


PROTOCOLS = {
    "chat": (
        "ChatCompletionRequest",
        "ChatCompletionResponse",
        {"messages": [{"role": "user", "content": "x"}]},
    ),
    "responses": ("ResponsesRequest", "ResponsesResponse", {"input": "x"}),
    "messages": (
        "MessagesRequest",
        "MessagesResponse",
        {"messages": [{"role": "user", "content": "x"}]},
    ),
}


def stream(codec: ModuleType, protocol: str, texts: list[str], *, collects: bool) -> None:
    request_name, response_name, body = PROTOCOLS[protocol]
    request_type = getattr(codec, request_name)
    request = request_type({"model": "DeepSeek-V4.1-Flash", **body}).convert(
        codec.ConversionOptions()
    )
    options = request.parsing_options
    options.parse_tool_calls = True
    generator = request_type.chunk_generator(request, "id", "model")
    processor = codec.StreamProcessor(generator, options)
    chunk = codec.InferenceChunk.text
    push = processor.push
    if collects:
        response = getattr(codec, response_name)("id", "model", 0, 0, 0)
        for text in texts:
            for event in push(chunk(text, 1)):
                response.accumulate(event)
        for event in processor.finish():
            response.accumulate(event)
        response.to_json()
        return
    for text in texts:
        for event in push(chunk(text, 1)):
            event.to_json()
    for event in processor.finish():
        event.to_json()


def rate(work: Callable[[], None], units: int, seconds: float) -> float:
    work()
    rounds = 0
    start = time.process_time()
    while (spent := time.process_time() - start) < seconds:
        work()
        rounds += 1
    return rounds * units / spent


def lines() -> list[tuple[str, int, Callable[[ModuleType], None]]]:
    same = conversation_body("same")
    as_dict = json.loads(same)
    fresh = iter(range(10**9))
    text = answer_text(105_000)
    small, large = pieces(text, 1, 4), pieces(text, 1000, 1000)
    out: list[tuple[str, int, Callable[[ModuleType], None]]] = [
        ("convert+render, bytes, same tools", 1, lambda c: render(c, same)),
        (
            "convert+render, bytes, new tools",
            1,
            lambda c: render(c, same.replace(b"same", b"%08d" % next(fresh))),
        ),
        ("convert+render, dict, same tools", 1, lambda c: render(c, as_dict)),
    ]
    for protocol in PROTOCOLS:
        out += [
            (
                f"{protocol}: 1-4 characters a chunk to JSON",
                len(small),
                lambda c, p=protocol: stream(c, p, small, collects=False),
            ),
            (
                f"{protocol}: 1 KB a chunk to JSON",
                len(large),
                lambda c, p=protocol: stream(c, p, large, collects=False),
            ),
        ]
    out += [
        ("whole 105 KB answer, one chunk", 1, lambda c: stream(c, "chat", [text], collects=True)),
        ("whole 105 KB answer, 1 KB chunks", 1, lambda c: stream(c, "chat", large, collects=True)),
        (
            "whole 105 KB answer, 1-4 characters",
            1,
            lambda c: stream(c, "chat", small, collects=True),
        ),
    ]
    return out


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    ours = importlib.import_module("deepinfer_recipe")
    try:
        reference = importlib.import_module("deepseek_recipe")
    except ImportError:
        reference = None
    print(f"{'per second of processor time':42} {'ours':>12} {'reference':>12} {'ratio':>7}")
    for name, units, work in lines():
        mine = rate(lambda w=work: w(ours), units, seconds)
        if reference is None:
            print(f"{name:42} {mine:12,.0f}")
            continue
        theirs = rate(lambda w=work: w(reference), units, seconds)
        print(f"{name:42} {mine:12,.0f} {theirs:12,.0f} {mine / theirs:7.2f}")


if __name__ == "__main__":
    main()
