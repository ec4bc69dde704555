# /// script
# dependencies = ["haystack-ai"]
# ///
"""Haystack's chat generator, streaming, and its agent with a tool."""

from common import FOX, KEY, MODEL, OPENAI, QUESTION, Report, check, weather
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

report = Report("haystack-ai")


def model(**more):
    return OpenAIChatGenerator(
        model=MODEL,
        api_base_url=OPENAI,
        api_key=Secret.from_token(KEY),
        generation_kwargs={"max_tokens": 200},
        **more,
    )


def stream():
    parts = []
    model(streaming_callback=parts.append).run([ChatMessage.from_user(FOX)])
    check(parts, "nothing came")


def agent():
    def get_weather(city: str) -> str:
        """Get the weather of a place."""
        return weather(city)

    loop = Agent(chat_generator=model(), tools=[create_tool_from_function(get_weather)])
    loop.max_agent_steps = 4
    loop.run(messages=[ChatMessage.from_user(QUESTION)])


report.step("chat", lambda: model().run([ChatMessage.from_user(FOX)]))
report.step("stream", stream)
report.step("agent", agent)
report.done()
