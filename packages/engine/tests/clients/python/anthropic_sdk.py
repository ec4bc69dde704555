# /// script
# dependencies = ["anthropic"]
# ///
"""The official Anthropic client: messages, streams, token counts, and its tool runner."""

import os

import anthropic
from anthropic import Anthropic, beta_tool
from common import FOX, KEY, MODEL, QUESTION, URL, Report, check, counters, weather

client = Anthropic(base_url=URL, api_key=KEY)
report = Report("anthropic")
TOOL = beta_tool(weather)
ASK = [{"role": "user", "content": QUESTION}]


def messages():
    answer = client.messages.create(
        model=MODEL, max_tokens=60, messages=[{"role": "user", "content": FOX}]
    )
    check(all(block.type == "text" for block in answer.content), "it thinks unasked")
    count = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": FOX}])
    check(count.input_tokens == _whole(answer.usage), f"{count} {answer.usage}")


def _whole(usage):
    return (
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )


def counts():
    """What the client is told of tokens and the cache is what the server counts."""
    before = counters()
    told = {"prompt": 0, "generated": 0, "cached": 0}
    words = f"{os.getpid()} " + "The owl and the fox walk through the garden. " * 60
    ask = [{"role": "user", "content": words}]
    count = client.messages.count_tokens(model=MODEL, messages=ask).input_tokens
    for _ in range(2):
        usage = client.messages.create(model=MODEL, max_tokens=20, messages=ask).usage
        check(_whole(usage) == count, f"{usage} {count}")
        told["prompt"] += _whole(usage)
        told["generated"] += usage.output_tokens
        told["cached"] += usage.cache_read_input_tokens or 0
    after = counters()
    check({kind: after[kind] - before[kind] for kind in told} == told, f"{told} {before} {after}")
    check(told["cached"] > 0, "nothing was cached")


def stream():
    with client.messages.stream(
        model=MODEL, max_tokens=60, messages=[{"role": "user", "content": FOX}]
    ) as events:
        text = "".join(events.text_stream)
        check(events.get_final_message().usage.output_tokens > 0, text)


def runner(choice, streams):
    options = {"tool_choice": choice} if choice else {}
    run = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=2000,
        tools=[TOOL],
        messages=ASK,
        max_iterations=3,
        stream=streams,
        **options,
    )
    turns = 0
    calls = 0
    for turn in run:
        message = turn.get_final_message() if streams else turn
        turns += 1
        calls += sum(block.type == "tool_use" for block in message.content)
    check(turns, "no turn")
    if choice and choice["type"] != "auto":
        check(calls, "a forced call was not made")


def client_tools():
    for tool in (
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
    ):
        client.beta.messages.create(model=MODEL, max_tokens=20, messages=ASK, tools=[tool])


def overflow():
    try:
        client.messages.create(
            model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "fox owl " * 80_000}]
        )
    except anthropic.BadRequestError as error:
        check("prompt is too long" in str(error), str(error)[:200])
    else:
        raise AssertionError("not refused")


report.step("messages", messages)
report.step("token and cache counts", counts)
report.step("stream", stream)
for choice in (None, {"type": "any"}, {"type": "tool", "name": "weather"}):
    name = choice["type"] if choice else "auto"
    report.step(f"tool runner {name}", lambda c=choice: runner(c, False))
    report.step(f"tool runner {name} stream", lambda c=choice: runner(c, True))
report.step("client tools", client_tools)
report.step("overflow", overflow)
report.done()
