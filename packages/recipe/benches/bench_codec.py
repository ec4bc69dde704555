"""Speed of the codec beside the reference package, same work, same run, one thread.

    python packages/recipe/benches/bench_codec.py [seconds per line and package]

The reference (`pip install deepseek-recipe==0.2.0`) is optional: without it the rates stand
alone. Rates are per second of processor time of this process. The packages take turns within
each line, and the best of five turns counts, so that other work on the machine disturbs little.
"pure" is this package without its compiled part (DEEPINFER_RECIPE_PURE=1), measured by a process
of its own; its ratio is taken in that process, with the reference beside it.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
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


TURNS = 5

Work = Callable[[ModuleType, Any], None]


def seconds_of(work: Callable[[Any], None], inputs: list[Any]) -> float:
    """Processor seconds that `work` takes for all of the inputs."""
    start = time.process_time()
    for item in inputs:
        work(item)
    return time.process_time() - start


def rates(
    codecs: list[ModuleType], work: Work, make: Callable[[], Any], seconds: float
) -> list[float]:
    """Best rate of each package, per second of processor time; they take turns."""
    best = [0.0] * len(codecs)
    counts = [0] * len(codecs)
    for index, codec in enumerate(codecs):
        for _ in range(2):  # the second run is warm
            spent = seconds_of(lambda item, c=codec: work(c, item), [make()])
        counts[index] = max(1, int(seconds / TURNS / max(spent, 1e-6)))
    for _ in range(TURNS):
        for index, codec in enumerate(codecs):
            inputs = [make() for _ in range(counts[index])]
            spent = seconds_of(lambda item, c=codec: work(c, item), inputs)
            best[index] = max(best[index], counts[index] / spent)
    return best


def lines() -> list[tuple[str, int, Work, Callable[[], Any]]]:
    """Name, units a run, what is run, and what makes its input (not timed)."""
    same = conversation_body("same")
    as_dict = json.loads(same)
    fresh = iter(range(10**9))
    text = answer_text(105_000)
    small, large = pieces(text, 1, 4), pieces(text, 1000, 1000)
    out: list[tuple[str, int, Work, Callable[[], Any]]] = [
        ("convert+render, bytes, same tools", 1, render, lambda: same),
        (
            "convert+render, bytes, new tools",
            1,
            render,
            lambda: same.replace(b"same", b"%08d" % next(fresh)),
        ),
        ("convert+render, dict, same tools", 1, render, lambda: as_dict),
    ]
    for protocol in PROTOCOLS:
        for name, texts in (("1-4 characters", small), ("1 KB", large)):
            out.append(
                (
                    f"{protocol}: {name} a chunk to JSON",
                    len(texts),
                    lambda c, texts, p=protocol: stream(c, p, texts, collects=False),
                    lambda texts=texts: texts,
                )
            )
    for name, texts in (("one chunk", [text]), ("1 KB chunks", large), ("1-4 characters", small)):
        out.append(
            (
                f"whole 105 KB answer, {name}",
                1,
                lambda c, texts: stream(c, "chat", texts, collects=True),
                lambda texts=texts: texts,
            )
        )
    return out


def measure(seconds: float) -> list[list[float]]:
    """Rates of every line: ours, and the reference's where it is installed."""
    codecs = [importlib.import_module("deepinfer_recipe")]
    try:
        codecs.append(importlib.import_module("deepseek_recipe"))
    except ImportError:
        print("deepseek_recipe is not installed: no ratios", file=sys.stderr)
    return [
        [rate * units for rate in rates(codecs, work, make, seconds)]
        for _, units, work, make in lines()
    ]


def measure_pure(seconds: float) -> list[list[float]]:
    """The same in a process without the compiled part."""
    script = f"import json, bench_codec; print(json.dumps(bench_codec.measure({seconds})))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "DEEPINFER_RECIPE_PURE": "1"},
    )
    return json.loads(done.stdout)


def cells(rates_of_line: list[float]) -> str:
    """Our rate and its ratio to the reference's."""
    ours, *reference = rates_of_line
    return f"{ours:12,.0f} " + (f"{ours / reference[0]:6.2f}" if reference else "")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    state = importlib.import_module("deepinfer_recipe.native").STATE
    measured = measure(seconds)
    pure = measure_pure(seconds) if state == "compiled" else None
    columns = [state, *(["pure Python"] if pure else [])]
    print(f"{'per second of processor time':38} {'reference':>12}", end="")
    print("".join(f"{name:>12}  ratio" for name in columns))
    for index, (name, *_) in enumerate(lines()):
        reference = f"{measured[index][1]:12,.0f}" if len(measured[index]) > 1 else " " * 12
        row = [measured[index], *([pure[index]] if pure else [])]
        print(f"{name:38} {reference}" + "".join(map(cells, row)))


if __name__ == "__main__":
    main()
