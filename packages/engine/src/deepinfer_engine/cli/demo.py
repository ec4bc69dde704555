"""`deepinfer demo`: a real server on a free port, a two-turn conversation with it over HTTP, and
the bill.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
from rich.console import Console

from deepinfer_engine.cli.chat import TOY_NOTICE
from deepinfer_engine.cli.client import ChatSource, http_source
from deepinfer_engine.cli.logs import setup_logging
from deepinfer_engine.cli.serve import served
from deepinfer_engine.cli.turn import Turn, show_turn
from deepinfer_engine.core.runner import BLOCK_TOKENS
from deepinfer_engine.server.run import bind
from deepinfer_engine.settings import Settings

# Long enough to fill several cache blocks, and made of sentences the embedded model has a grammar
# for.
SYSTEM = "\n".join(
    (
        "You are a helpful assistant.",
        "Always answer in short sentences.",
        "Ruth is a teacher from Lisbon.",
        "The lamp is kept in the garden and costs 12 coins.",
        "Omar is a baker from Cairo.",
        "The password of the box is marolin.",
        "Be polite and friendly.",
        "The clock is kept in the library and costs 48 coins.",
        "Iris is a doctor from Oslo.",
        "If you do not know the answer, say so.",
        "The basket is kept in the kitchen and costs 7 coins.",
        "Leo is a painter from Rome.",
        "The password of the lamp is tesuri.",
        "Use simple words.",
        "The mirror is kept in the tower and costs 31 coins.",
        "Nina is a farmer from Dublin.",
        "Do not repeat yourself.",
        "The drum is kept in the market and costs 25 coins.",
        "Hugo is a sailor from Athens.",
        "The password of the clock is bodane.",
        "Answer in English.",
        "The kite is kept in the school and costs 16 coins.",
        "Zoe is a singer from Vienna.",
        "The bottle is kept in the mill and costs 64 coins.",
        "Think before you answer.",
        "Paul is a cook from Berlin.",
        "The violin is kept in the church and costs 90 coins.",
        "Tina is a nurse from Prague.",
        "The password of the violin is lumera.",
        "The spoon is kept in the bakery and costs 5 coins.",
        "Felix is a pilot from Madrid.",
        "Keep the answer under fifty words.",
    )
)
QUESTIONS = ("Hello, my name is Ana.", "I live near the garden. What is my name?")
REAL_QUESTIONS = ("What is the capital of France?", "And what is it known for? One sentence.")
TOWN = {
    "type": "object",
    "properties": {"town": {"type": "string", "enum": ["Rome", "Oslo", "Paris"]}},
    "required": ["town"],
    "additionalProperties": False,
}
ASK = "What is the weather in Oslo? Use the tool."


def run_demo(settings: Settings, *, keep: bool) -> int:
    """0 when both answers came. Everything but the answers goes to standard error."""
    setup_logging(settings.log_level)
    try:
        return asyncio.run(_demo(settings, keep))
    except KeyboardInterrupt:
        return 0 if keep else 130


async def _demo(settings: Settings, keep: bool) -> int:
    out = Console(highlight=False, soft_wrap=True)
    about = Console(stderr=True, highlight=False, soft_wrap=True)
    toy = settings.model in (None, "demo")
    if toy:
        about.print(TOY_NOTICE, style="yellow")
    workers = (
        "one process" if settings.single_process else "a router, a prefill and a decode process"
    )
    about.print(f"Starting the server: {workers} ...")
    async with served(settings, bind(settings.host, settings.port), about) as url:
        about.print(f"Serving on {url}")
        async with http_source(url, None) as source:
            turns = await _conversation(source, QUESTIONS if toy else REAL_QUESTIONS, out, about)
            if not toy:
                await _tool_calls(url, source.model, about)
        _bill(turns, about)
        _next_steps(url, source.model, keep, about)
        if keep:
            await asyncio.Event().wait()
    return 0


async def _conversation(
    source: ChatSource, questions: Sequence[str], out: Console, about: Console
) -> list[Turn]:
    history: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    turns: list[Turn] = []
    for question in questions:
        history.append({"role": "user", "content": question})
        about.print(f"\n[bold]you[/]   {question}")
        body = {"model": source.model, "messages": history, "temperature": 0, "max_tokens": 200}
        turn = await show_turn(source, body, out)
        history.append({"role": "assistant", "content": turn.content})
        about.print(f"      {turn.summary()}", style="dim")
        turns.append(turn)
    return turns


async def _tool_calls(url: str, model: str, about: Console) -> None:
    """The same tool over the three protocols, each answer held to its schema."""
    function = {"name": "weather", "description": "The weather in a town.", "parameters": TOWN}
    ask = [{"role": "user", "content": ASK}]
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {
            "messages": ask,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "max_tokens": 100,
        },
        "responses": {
            "input": ASK,
            "tools": [{"type": "function", **function}],
            "tool_choice": "required",
            "max_output_tokens": 100,
        },
        "messages": {
            "messages": ask,
            "tools": [{"name": "weather", "description": "", "input_schema": TOWN}],
            "tool_choice": {"type": "any"},
            "max_tokens": 100,
        },
    }
    about.print("\nThe same tool over three protocols:")
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for route, body in bodies.items():
            answer = await client.post(f"/v1/{route}", json={"model": model, **body})
            about.print(f"  /v1/{route}: {_call_in(route, answer)}", markup=False)


def _call_in(route: str, answer: httpx.Response) -> str:
    """Name and arguments of the first tool call, or what was said instead."""
    body = answer.json()
    if answer.status_code != 200:
        return str(body["error"]["message"])
    if route == "chat/completions":
        calls = body["choices"][0]["message"].get("tool_calls") or []
        found = [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
    elif route == "responses":
        items = [i for i in body["output"] if i["type"] == "function_call"]
        found = [(i["name"], i["arguments"]) for i in items]
    else:
        blocks = [b for b in body["content"] if b["type"] == "tool_use"]
        found = [(b["name"], json.dumps(b["input"])) for b in blocks]
    return f"{found[0][0]}({found[0][1]})" if found else "no call"


def _bill(turns: list[Turn], about: Console) -> None:
    first, second = turns
    prompt, cached = second.usage["prompt_tokens"], second.usage["prompt_cache_hit_tokens"]
    about.print(
        f"\nThe second turn sent {prompt} tokens and computed {prompt - cached} of them: {cached} "
        f"({cached // BLOCK_TOKENS} blocks of {BLOCK_TOKENS}) came from the prompt cache on disk."
    )
    if first.usage["prompt_cache_hit_tokens"]:
        about.print("The first turn hit it too: it was stored by an earlier run.")


def _next_steps(url: str, model: str, keep: bool, about: Console) -> None:
    body = (
        f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Tell me a story."}}]}}'
    )
    claude = body[:-1] + ', "max_tokens": 200}'
    about.print(
        "\nThe same server speaks two protocols:"
        if keep
        else "\nThis server stops now. Keep it with `deepinfer demo --keep`, or start one with "
        "`deepinfer serve`; then:",
        markup=False,
    )
    base = url if keep else "http://127.0.0.1:8000"
    json_header = "-H 'content-type: application/json'"
    about.print(f"  curl {base}/v1/chat/completions {json_header} -d '{body}'", markup=False)
    about.print(f"  curl {base}/v1/messages {json_header} -d '{claude}'", markup=False)
    about.print(f"  curl {base}/metrics", markup=False)
    if keep:
        about.print("Ctrl-C ends it.")
