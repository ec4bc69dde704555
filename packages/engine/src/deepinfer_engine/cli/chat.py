"""`deepinfer chat`: ask once, or hold a conversation."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from deepinfer_engine.cli.client import ChatSource, http_source, local_source
from deepinfer_engine.cli.logs import setup_logging
from deepinfer_engine.cli.turn import show_turn
from deepinfer_engine.errors import RequestError
from deepinfer_engine.settings import Settings

TOY_NOTICE = (
    "The embedded model is a toy that shows the machinery: "
    "it knows nothing outside its small grammar."
)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the user asked for on the command line."""

    prompt: str | None = None
    url: str | None = None
    api_key: str | None = None
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    thinking: bool = True


def run_chat(settings: Settings, options: ChatOptions) -> int:
    """The answer goes to standard output, everything about it to standard error.

    Raises RequestError for a prompt that is not UTF-8.
    """
    setup_logging("warning")
    for name, text in (("the prompt", options.prompt), ("--system", options.system)):
        if not _is_utf8(text or ""):
            raise RequestError(f"{name} is not UTF-8 text")
    return asyncio.run(_chat(settings, options))


async def _chat(settings: Settings, options: ChatOptions) -> int:
    out = Console(highlight=False, soft_wrap=True)
    about = Console(stderr=True, highlight=False, soft_wrap=True)
    if options.url is None and settings.model in (None, "demo"):
        about.print(TOY_NOTICE, style="yellow")
    opened = http_source(options.url, options.api_key) if options.url else local_source(settings)
    async with opened as source:
        history: list[dict[str, Any]] = []
        if options.system:
            history.append({"role": "system", "content": options.system})
        if options.prompt is not None:
            await _turn(source, history, options.prompt, options, out, about)
            return 0
        about.print("Ctrl-D ends the conversation.", style="dim")
        while (question := _ask()) is not None:
            if not _is_utf8(question):
                about.print("This line is not UTF-8 text; ask again.", style="red")
            elif question:
                await _turn(source, history, question, options, out, about)
    return 0


async def _turn(
    source: ChatSource,
    history: list[dict[str, Any]],
    question: str,
    options: ChatOptions,
    out: Console,
    about: Console,
) -> None:
    history.append({"role": "user", "content": question})
    body: dict[str, Any] = {
        "model": source.model,
        "messages": history,
        "thinking": {"type": "enabled" if options.thinking else "disabled"},
    }
    if options.temperature is not None:
        body["temperature"] = options.temperature
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    turn = await show_turn(source, body, out)
    history.append({"role": "assistant", "content": turn.content})
    about.print(turn.summary(), style="dim")


def _is_utf8(text: str) -> bool:
    """False for what was read of bytes that spell nothing."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ask() -> str | None:
    """The next line, None at its end. Blocks the loop on purpose: nothing else runs meanwhile."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.buffer.readline().decode("utf-8", errors="surrogateescape")
    return line.strip() if line else None
