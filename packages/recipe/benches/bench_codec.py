"""Speed of the codec beside the reference package, same work, same run, one thread.

    python packages/recipe/benches/bench_codec.py [--seconds 0.5] [--json FILE] [--no-pure]
    python packages/recipe/benches/bench_codec.py --table FILE     # the page's table of a run

The reference (`pip install deepseek-recipe==0.2.0`) is optional: without it the rates stand
alone. Rates are per second of processor time of this process. The packages take turns within
each line, and the best of five turns counts, so that other work on the machine disturbs little.
"pure" is this package without its compiled part (DEEPINFER_RECIPE_PURE=1), measured by a process
of its own; its ratio is taken in that process, with the reference beside it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
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


def plain_body(messages: int) -> bytes:
    """A conversation without tools."""
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": f"Message {n}. " + "Some words. " * 20}
        for n in range(messages)
    ]
    return json.dumps({"model": "DeepSeek-V4.1-Flash", "messages": turns}).encode()


SAMPLES = {
    "code": "def f(x: int) -> list[str]:\n    return [str(i) for i in range(x) if i < 3]\n\n",
    "Chinese": "天气预报说今天下午有雨,请带伞。我们再看一看明天的情况。\n",
    "emoji": "Sure 👍🏽! Done ✅ - see 🧑‍💻 below 🎉.\n",
}


def sample_text(kind: str, size: int) -> str:
    text = SAMPLES[kind] * (size // len(SAMPLES[kind]))
    return f"{text[: size // 2]}</think>\n\n{text[size // 2 :]}"


def long_argument(size: int) -> str:
    """One call whose string argument is a long file."""
    head = '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    value = ANSWER * (size // len(ANSWER))
    return (
        f'ok</think>{head}<｜DSML｜ parameter name="text" string="true">{value}'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )


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
    for count in (21, 201):
        body = plain_body(count)
        out.append((f"convert+render, {count} messages, no tools", 1, render, lambda b=body: b))
    argument = pieces(long_argument(100_000), 1, 4)
    out += [
        (
            f"{protocol}: 100 KB string argument, 1-4 characters",
            len(argument),
            lambda c, texts, p=protocol: stream(c, p, texts, collects=False),
            lambda: argument,
        )
        for protocol in PROTOCOLS
    ]
    for kind in SAMPLES:
        texts = pieces(sample_text(kind, 100_000), 1, 4)
        out.append(
            (
                f"chat: {kind}, 1-4 characters a chunk",
                len(texts),
                lambda c, texts: stream(c, "chat", texts, collects=False),
                lambda texts=texts: texts,
            )
        )
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


def table(run: dict[str, Any]) -> str:
    """A run as the table of the package's page."""
    head = ["per second of processor time", "reference", *run["states"]]
    columns = [x for name in head[2:] for x in (name, "ratio")]
    rows = [[*head[:2], *columns], ["---"] * (2 + len(columns))]
    for name, ours in run["lines"].items():
        reference = ours[0][1] if len(ours[0]) > 1 else None
        row = [name, "-" if reference is None else f"{reference:,.0f}"]
        for rates_of_state in ours:
            ratio = "-" if reference is None else f"{rates_of_state[0] / rates_of_state[1]:.2f}"
            row += [f"{rates_of_state[0]:,.0f}", ratio]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the codec beside the reference.")
    parser.add_argument("--seconds", type=float, default=0.5, help="for a line and package")
    parser.add_argument("--json", type=Path, help="where to keep the run")
    parser.add_argument("--table", type=Path, help="print the table of a kept run, run nothing")
    parser.add_argument("--no-pure", action="store_true", help="leave pure Python out")
    options = parser.parse_args()
    if options.table is not None:
        print(table(json.loads(options.table.read_text("utf-8"))))
        return
    state = importlib.import_module("deepinfer_recipe.native").STATE
    measured = [measure(options.seconds)]
    states = [state]
    if state == "compiled" and not options.no_pure:
        measured.append(measure_pure(options.seconds))
        states.append("pure Python")
    run = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "states": states,
        "lines": {
            name: [of_state[index] for of_state in measured]
            for index, (name, *_) in enumerate(lines())
        },
    }
    if options.json is not None:
        options.json.write_text(json.dumps(run, indent=1), encoding="utf-8")
    print(table(run))


if __name__ == "__main__":
    main()
