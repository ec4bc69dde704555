# /// script
# dependencies = ["pydantic-ai-slim[openai,anthropic]"]
# ///
"""Pydantic AI by Chat, Responses and Messages: a tool, and a typed output by a forced call."""

from anthropic import AsyncAnthropic
from common import KEY, MODEL, OPENAI, QUESTION, URL, Report, check, weather
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

report = Report("pydantic-ai", "pydantic-ai-slim")
openai = OpenAIProvider(base_url=OPENAI, api_key=KEY)
messages = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key=KEY))
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=openai),
    "responses": OpenAIResponsesModel(MODEL, provider=openai),
    "messages": AnthropicModel(MODEL, provider=messages),
}
LIMIT = {"max_tokens": 2000}


class Person(BaseModel):
    name: str
    age: int


def tool(model):
    agent = Agent(model, tools=[weather], model_settings=LIMIT)
    check(agent.run_sync(QUESTION).output is not None, "no output")


def typed(model):
    agent = Agent(model, output_type=Person, model_settings=LIMIT, retries=3)
    check(isinstance(agent.run_sync("Ana is 7 years old.").output, Person), "not a person")


for name, model in MODELS.items():
    report.step(f"{name} tool", lambda m=model: tool(m))
    report.step(f"{name} typed", lambda m=model: typed(m))
report.done()
