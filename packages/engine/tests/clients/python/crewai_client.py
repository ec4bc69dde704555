# /// script
# dependencies = ["crewai", "litellm"]
# ///
"""CrewAI: one agent, one task, one tool."""

import os

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", OTEL_SDK_DISABLED="true")

from common import KEY, MODEL, OPENAI, QUESTION, Report, check, weather
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

report = Report("crewai")
llm = LLM(model=f"openai/{MODEL}", base_url=OPENAI, api_key=KEY, max_tokens=300)


def crew():
    agent = Agent(
        role="Helper",
        goal="Answer",
        backstory="You help.",
        llm=llm,
        tools=[tool(weather)],
        max_iter=3,
    )
    task = Task(description=QUESTION, expected_output="one sentence", agent=agent)
    check(Crew(agents=[agent], tasks=[task]).kickoff().raw is not None, "no result")


report.step("llm", lambda: check(llm.call("Tell me a story.") is not None, "no text"))
report.step("crew", crew)
report.done()
