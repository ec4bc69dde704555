# /// script
# dependencies = ["litellm"]
# ///
"""LiteLLM by its OpenAI and its Anthropic provider."""

import litellm
from common import FOX, KEY, MODEL, OPENAI, QUESTION, URL, Report, check

report = Report("litellm")
ASK = {"messages": [{"role": "user", "content": FOX}], "max_tokens": 40, "api_key": KEY}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def ask(provider, base, **more):
    return litellm.completion(model=f"{provider}/{MODEL}", api_base=base, **{**ASK, **more})


def stream(provider, base):
    parts = list(ask(provider, base, stream=True))
    check(parts, "nothing came")


def forced(provider, base):
    answer = ask(
        provider,
        base,
        tools=[TOOL],
        tool_choice="required",
        max_tokens=2000,
        messages=[{"role": "user", "content": QUESTION}],
    )
    check(answer.choices[0].message.tool_calls, "a forced call was not made")


def overflow(provider, base):
    try:
        ask(provider, base, messages=[{"role": "user", "content": "fox owl " * 80_000}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("not refused as too long")


for provider, base in (("openai", OPENAI), ("anthropic", URL)):
    report.step(f"{provider}", lambda p=provider, b=base: ask(p, b))
    report.step(f"{provider} stream", lambda p=provider, b=base: stream(p, b))
    report.step(f"{provider} forced", lambda p=provider, b=base: forced(p, b))
    report.step(f"{provider} overflow", lambda p=provider, b=base: overflow(p, b))
report.done()
