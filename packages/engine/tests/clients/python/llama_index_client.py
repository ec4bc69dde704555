# /// script
# dependencies = ["llama-index-llms-openai-like", "llama-index-core"]
# ///
"""LlamaIndex's OpenAI-like model: chat, stream, and an agent with a tool."""

import asyncio

from common import FOX, KEY, MODEL, OPENAI, QUESTION, Report, check, weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

report = Report("llama-index", "llama-index-llms-openai-like")
model = OpenAILike(
    model=MODEL,
    api_base=OPENAI,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=200,
)
ASK = [ChatMessage(role="user", content=FOX)]


def agent():
    async def go():
        loop = FunctionAgent(tools=[weather], llm=model, streaming=True)
        await loop.run(QUESTION, max_iterations=8)

    asyncio.run(go())


report.step("chat", lambda: check(model.chat(ASK).message, "no message"))
report.step("stream", lambda: check(list(model.stream_chat(ASK)), "nothing came"))
report.step("complete", lambda: check(model.complete("Once upon") is not None, "nothing"))
report.step("agent", agent)
report.done()
