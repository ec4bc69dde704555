# /// script
# dependencies = ["smolagents[openai]"]
# ///
"""smolagents' agent that calls tools; it forces a call at every step."""

from common import KEY, MODEL, OPENAI, QUESTION, Report, check, weather
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

report = Report("smolagents")
model = OpenAIServerModel(model_id=MODEL, api_base=OPENAI, api_key=KEY, max_tokens=2000)


def answer():
    message = model([{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}])
    check(message is not None, "no message")


def agent():
    loop = ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=3)
    loop.run(QUESTION)
    steps = [s for s in loop.memory.steps if getattr(s, "tool_calls", None)]
    check(steps, "no step called a tool")


report.step("answer", answer)
report.step("tool agent", agent)
report.done()
