# /// script
# dependencies = ["langchain-openai", "langchain"]
# ///
"""LangChain's OpenAI chat model: answers, streams, bound tools, structured output, an agent."""

from common import FOX, KEY, MODEL, OPENAI, QUESTION, Report, check, weather
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

report = Report("langchain-openai")
model = ChatOpenAI(model=MODEL, base_url=OPENAI, api_key=KEY, max_tokens=2000)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def forced():
    answer = model.bind_tools([tool(weather)], tool_choice="any").invoke(QUESTION)
    check(answer.tool_calls, "a forced call was not made")


def agent():
    loop = create_agent(model, tools=[tool(weather)])
    loop.invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 12})


def structured(method):
    # Nothing bounds a name, and a model this small may go on with one until its tokens are gone.
    calm = ChatOpenAI(model=MODEL, base_url=OPENAI, api_key=KEY, max_tokens=2000, temperature=0)
    value = calm.with_structured_output(Person, method=method).invoke("Ana is 7 years old.")
    check(isinstance(value, Person), str(value))


report.step("invoke", lambda: model.invoke(FOX))
report.step("stream", lambda: check(list(model.stream(FOX)), "nothing came"))
report.step("forced tool", forced)
report.step("agent", agent)
report.step("json_schema", lambda: structured("json_schema"))
report.step("function_calling", lambda: structured("function_calling"))
report.done()
