# /// script
# dependencies = ["openai"]
# ///
"""The official OpenAI client: chat, streams, tools in a loop, Responses, Completions, models."""

import json
import os

import openai
from common import FOX, KEY, MODEL, OPENAI, QUESTION, Report, check, counters, weather
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=OPENAI, api_key=KEY)
report = Report("openai")


class Weather(BaseModel):
    """Get the weather of a place."""

    city: str


class Person(BaseModel):
    name: str
    age: int


def chat():
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": FOX}], max_completion_tokens=60
    )
    check(answer.choices[0].message is not None, "no message")
    usage = answer.usage
    check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, str(usage))


def stream():
    parts = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": FOX}],
            max_completion_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    check(parts[-1].usage and not parts[-1].choices, "no usage chunk at the end")


def several():
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": FOX}], max_completion_tokens=8, n=3
    )
    check(len(answer.choices) == 3, f"{len(answer.choices)} choices")


def tool_loop(choice, streams):
    tools = [pydantic_function_tool(Weather, name="weather")]
    messages = [{"role": "user", "content": QUESTION}]
    calls = 0
    for turn in range(4):
        options = {"tool_choice": choice if turn == 0 else "auto"}
        if streams:
            with client.chat.completions.stream(
                model=MODEL, messages=messages, tools=tools, max_tokens=2000, **options
            ) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = (
                client.chat.completions.create(
                    model=MODEL, messages=messages, tools=tools, max_tokens=2000, **options
                )
                .choices[0]
                .message
            )
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            break
        calls += len(message.tool_calls)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = weather(city=arguments["city"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if choice != "auto":
        check(calls, "a forced call was not made")


def parsed():
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Ana is 7 years old."}],
        response_format=Person,
        max_completion_tokens=800,
    )
    check(isinstance(answer.choices[0].message.parsed, Person), str(answer))


def responses(streams):
    if streams:
        with client.responses.stream(model=MODEL, input=FOX, max_output_tokens=60) as events:
            names = [event.type for event in events]
        check(names[-1] in ("response.completed", "response.incomplete"), names[-1])
    else:
        answer = client.responses.create(model=MODEL, input=FOX, max_output_tokens=60)
        check(answer.usage.total_tokens > 0, "no usage")


def counts():
    """What the client is told of tokens and the cache is what the server counts."""
    before = counters()
    told = {"prompt": 0, "generated": 0, "cached": 0}
    words = f"{os.getpid()} " + "The fox and the owl walk through the garden. " * 60
    for _ in range(2):
        usage = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": words}], max_completion_tokens=20
        ).usage
        told["prompt"] += usage.prompt_tokens
        told["generated"] += usage.completion_tokens
        told["cached"] += usage.prompt_tokens_details.cached_tokens
    after = counters()
    check({kind: after[kind] - before[kind] for kind in told} == told, f"{told} {before} {after}")
    check(told["cached"] > 0, "nothing was cached")


def completions():
    answer = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=8, n=2)
    check(len(answer.choices) == 2, "choices")


def errors():
    try:
        client.embeddings.create(model=MODEL, input="x")
    except openai.NotFoundError as error:
        check("embedding" in str(error).lower(), str(error))
    try:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    except openai.NotFoundError as error:
        check(error.code == "model_not_found", str(error))


report.step("chat", chat)
report.step("stream", stream)
report.step("n", several)
for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
    name = choice if isinstance(choice, str) else "named"
    report.step(f"tools {name}", lambda c=choice: tool_loop(c, False))
    report.step(f"tools {name} stream", lambda c=choice: tool_loop(c, True))
report.step("structured output", parsed)
report.step("responses", lambda: responses(False))
report.step("responses stream", lambda: responses(True))
report.step("token and cache counts", counts)
report.step("completions", completions)
report.step("models", lambda: check(MODEL in [m.id for m in client.models.list()], "not listed"))
report.step("errors", errors)
report.done()
