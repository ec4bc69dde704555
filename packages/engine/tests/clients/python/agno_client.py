# /// script
# dependencies = ["agno", "openai", "anthropic"]
# ///
"""Agno: an agent with a tool over an OpenAI-like model, plain and streaming."""

from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from common import KEY, MODEL, OPENAI, QUESTION, Report, check, weather

report = Report("agno")


def agent(streams):
    model = OpenAILike(id=MODEL, base_url=OPENAI, api_key=KEY, max_tokens=300)
    loop = Agent(model=model, tools=[weather], tool_call_limit=3, telemetry=False)
    if streams:
        check(list(loop.run(QUESTION, stream=True)), "nothing came")
    else:
        check(loop.run(QUESTION).status != "ERROR", "it failed")


report.step("agent", lambda: agent(False))
report.step("agent stream", lambda: agent(True))
report.done()
