"""`deepinfer drain`: empty a worker or a server before it is taken away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_engine.cli.options import ServerUrl, bearer
from deepinfer_engine.errors import ConfigError, EngineUnavailable

if TYPE_CHECKING:
    import httpx

_EVERY_S = 0.5


def drain(
    url: ServerUrl,
    worker: Annotated[
        str | None, typer.Option(help="host:port of one worker; default: the whole server.")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Take requests again.")] = False,
    move: Annotated[
        bool, typer.Option("--move", help="What the worker runs goes on with others at once.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when nothing runs there any more.")
    ] = True,
    timeout_s: Annotated[float, typer.Option(help="Longest wait, in seconds.")] = 120.0,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="First line: the admin key; else DEEPINFER_ADMIN_KEY.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="DEEPINFER_ADMIN_KEY", hidden=True)
    ] = None,
) -> int:
    """Give a worker, or a whole server, nothing new, and wait until what it runs has ended."""
    if admin_key_file is not None:
        from deepinfer_engine.server.auth import read_secret

        admin_key = read_secret(admin_key_file)
    if not admin_key:
        raise ConfigError("draining wants the admin key: --admin-key-file or DEEPINFER_ADMIN_KEY")
    order = {"worker": worker, "on": not undo, "move": move}
    left = asyncio.run(_drain(url, admin_key, order, timeout_s if wait and not undo else 0.0))
    name = worker or "the server"
    print(f"{name} takes requests again" if undo else f"{name} is draining; {left} requests left")
    if left and wait and not undo:
        raise EngineUnavailable(f"{left} requests still run after {timeout_s:g} s")
    return 0


async def _drain(url: str, key: str, order: dict[str, Any], patience_s: float) -> int:
    """How many requests are left."""
    import httpx

    headers = bearer(key)
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30.0) as client:
        fleet = await _asked(client, "POST", "/admin/drain", order)
        while (left := _left(fleet, order["worker"])) and loop.time() < end:
            await asyncio.sleep(_EVERY_S)
            fleet = await _asked(client, "GET", "/admin/workers")
        return left


def _left(fleet: dict[str, Any], worker: str | None) -> int:
    if worker is None:
        return int(fleet["running"])
    return sum(int(one["running"]) for one in fleet["workers"] if one["name"] == worker)


async def _asked(
    client: httpx.AsyncClient, method: str, path: str, body: Any = None
) -> dict[str, Any]:
    import httpx

    from deepinfer_engine.cli.client import raise_for

    try:
        answer = await client.request(method, path, json=body)
    except httpx.HTTPError as exc:
        raise EngineUnavailable(f"no server answers at {client.base_url}: {exc}") from exc
    raise_for(answer.status_code, answer.content)
    return answer.json()
