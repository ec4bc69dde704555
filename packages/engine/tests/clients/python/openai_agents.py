# /// script
# dependencies = ["openai-agents"]
# ///
"""OpenAI Agents SDK over Responses and over Chat Completions, with a tool, forced and auto."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import KEY, MODEL, OPENAI, QUESTION, Report, check, weather
from openai import AsyncOpenAI

set_tracing_disabled(True)
report = Report("openai-agents")
KINDS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


def run(kind, choice, streams):
    async def go():
        client = AsyncOpenAI(base_url=OPENAI, api_key=KEY)
        agent = Agent(
            name="Helper",
            instructions="Use tools.",
            tools=[function_tool(weather)],
            model=KINDS[kind](model=MODEL, openai_client=client),
            model_settings=ModelSettings(tool_choice=choice, max_tokens=2000),
        )
        if streams:
            result = Runner.run_streamed(agent, QUESTION, max_turns=6)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, QUESTION, max_turns=6)
        names = [type(item).__name__ for item in result.new_items]
        if choice == "required":
            check("ToolCallOutputItem" in names, str(names))

    asyncio.run(go())


for kind in KINDS:
    for choice in ("auto", "required"):
        report.step(f"{kind} {choice}", lambda k=kind, c=choice: run(k, c, False))
        report.step(f"{kind} {choice} stream", lambda k=kind, c=choice: run(k, c, True))
report.done()
