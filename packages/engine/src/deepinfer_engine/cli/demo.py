"""`deepinfer demo`: a real server on a free port, a two-turn conversation with it over HTTP, and
the bill.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rich.console import Console

from deepinfer_engine.cli.chat import TOY_NOTICE
from deepinfer_engine.cli.client import ChatSource, http_source
from deepinfer_engine.cli.serve import served, setup_logging
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
    about.print(TOY_NOTICE, style="yellow")
    workers = (
        "one process" if settings.single_process else "a router, a prefill and a decode process"
    )
    about.print(f"Starting the server: {workers} ...")
    async with served(settings, bind(settings.host, settings.port), about) as url:
        about.print(f"Serving on {url}")
        async with http_source(url, None) as source:
            turns = await _conversation(source, out, about)
        _bill(turns, about)
        _next_steps(url, source.model, keep, about)
        if keep:
            await asyncio.Event().wait()
    return 0


async def _conversation(source: ChatSource, out: Console, about: Console) -> list[Turn]:
    history: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    turns: list[Turn] = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        about.print(f"\n[bold]you[/]   {question}")
        body = {"model": source.model, "messages": history, "temperature": 0, "max_tokens": 200}
        turn = await show_turn(source, body, out)
        history.append({"role": "assistant", "content": turn.content})
        about.print(f"      {turn.summary()}", style="dim")
        turns.append(turn)
    return turns


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
