"""`deepinfer serve` and `deepinfer router`: the HTTP process, and the workers below it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvloop
from rich.console import Console

from deepinfer_engine import __version__
from deepinfer_engine.cli.launch import build_codec, launched_engine, opened_search
from deepinfer_engine.cli.logs import setup_logging
from deepinfer_engine.server.auth import accepted_keys, read_secret
from deepinfer_engine.server.exposure import check_exposure
from deepinfer_engine.server.run import (
    bind,
    give_large_blocks_back,
    listening,
    room_for_connections,
    url_of,
)
from deepinfer_engine.settings import Settings

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_serve(settings: Settings, console: Console) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once."""
    setup_logging(settings.log_level)
    # What is not safe or not possible is told before a model is loaded.
    keys, admin_key = accepted_keys(settings), read_secret(settings.admin_key_file)
    check_exposure(settings, keys, admin_key)
    room = room_for_connections(settings.max_connections)
    settings = settings.model_copy(update={"max_connections": room})
    if not settings.single_process:
        give_large_blocks_back()
    sock = bind(settings.host, settings.port)
    # It takes less of the processor for a streamed token than asyncio's own loop.
    return uvloop.run(_serve_until_signal(settings, sock, console))


async def _serve_until_signal(settings: Settings, sock: socket.socket, console: Console) -> int:
    loop = asyncio.get_running_loop()
    started, stop = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        async with served(settings, sock, console) as url:
            name = settings.model_names[0]
            line = f"deepinfer {__version__} serves {name} on {url}"
            console.print(line, highlight=False, markup=False)
            started.set()
            await stop.wait()
            console.print("draining; another Ctrl-C ends at once")

    running = asyncio.create_task(body())

    def on_signal() -> None:
        if stop.is_set() or not started.is_set():
            running.cancel()
        stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        await running
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        return 130
    return 0


@asynccontextmanager
async def served(
    settings: Settings, sock: socket.socket, console: Console
) -> AsyncGenerator[str, None]:
    """The whole server while the body runs: engine, then HTTP on `sock`; taken down in reverse."""
    from deepinfer_engine.server.app import create_app

    async with AsyncExitStack() as stack:
        web = await stack.enter_async_context(opened_search(settings))
        codec = build_codec(settings, serves=True, web=web)
        with console.status("starting") as status:
            loading: dict[str, str] = {}

            def on_notice(name: str, notice: dict[str, Any]) -> None:
                loading[name] = str(notice["event"])
                status.update(", ".join(f"{worker}: {event}" for worker, event in loading.items()))

            engine = await stack.enter_async_context(launched_engine(settings, on_notice))
        app = create_app(engine, codec, settings)
        await stack.enter_async_context(listening(app, sock, settings.drain_timeout_s))
        yield url_of(sock)
