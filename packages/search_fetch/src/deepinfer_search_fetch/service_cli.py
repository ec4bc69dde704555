"""Commands of the service: serve, mcp, usage, keys."""

from __future__ import annotations

import ipaddress
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_search_fetch.cli_options import AllowCidr, AllowPort, AsJson, Home, make_config
from deepinfer_search_fetch.errors import InvalidRequestError

if TYPE_CHECKING:
    from deepinfer_search_fetch.service.auth import KeyStore

keys_app = typer.Typer(no_args_is_help=True, help="API keys of the service.")


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command()(serve)
    app.command()(mcp)
    app.command()(usage)
    app.add_typer(keys_app, name="keys")


def serve(
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = any free one.")] = 8900,
    home: Home = None,
    allow_cidr: AllowCidr = None,
    allow_port: AllowPort = None,
    settings: Annotated[
        Path | None,
        typer.Option("--settings", help="TOML file of prices and limits; service.toml of --home."),
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="No API keys; only on a loopback address.")
    ] = False,
) -> None:
    """Run the REST service, the MCP endpoint and the page to try them."""
    from deepinfer_search_fetch.service.run import run_service
    from deepinfer_search_fetch.service.settings import SETTINGS_FILE, ServiceSettings

    if no_auth and not _is_loopback(host):
        raise InvalidRequestError(
            "invalid_argument", f"--no-auth needs a loopback --host, not {host}"
        )
    config = make_config(home, allow_cidr, allow_port)
    file = settings or config.home / SETTINGS_FILE
    chosen = ServiceSettings.from_file(file) if settings or file.is_file() else ServiceSettings()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("mcp").setLevel(logging.WARNING)
    run_service(config, chosen, host, port, with_keys=not no_auth)


def mcp(home: Home = None, allow_cidr: AllowCidr = None, allow_port: AllowPort = None) -> None:
    """Serve web_search and web_fetch over MCP on stdin and stdout (needs the `mcp` extra)."""
    from deepinfer_search_fetch.service.mcp import run_stdio

    run_stdio(make_config(home, allow_cidr, allow_port))


def usage(
    home: Home = None,
    since: Annotated[
        str | None, typer.Option("--from", help="RFC 3339 date or time, inclusive.")
    ] = None,
    until: Annotated[str | None, typer.Option("--to", help="The same, exclusive.")] = None,
    group_by: Annotated[
        str, typer.Option(help="Of key, endpoint, day, month; commas between.")
    ] = "key,endpoint",
    as_json: AsJson = False,
) -> None:
    """Sums of the ledger: a table on a terminal, JSON in a pipe."""
    from deepinfer_search_fetch import terminal
    from deepinfer_search_fetch.service.metering import Ledger
    from deepinfer_search_fetch.service.run import LEDGER_FILE
    from deepinfer_search_fetch.service.usage import report

    ledger = Ledger(_home(home) / LEDGER_FILE)
    found = report(ledger, None, since, until, group_by)
    ledger.close()
    if as_json or not sys.stdout.isatty():
        print(json.dumps(found, indent=2))
    else:
        terminal.show_usage(found)


@keys_app.command("create")
def keys_create(
    name: Annotated[str, typer.Argument(help="Whose key it is, for lists and logs.")],
    home: Home = None,
    scope: Annotated[list[str] | None, typer.Option(help="search, fetch, ingest or admin.")] = None,
    monthly_quota: Annotated[
        int | None, typer.Option(min=1, help="Billable calls a month; none by default.")
    ] = None,
) -> None:
    """Make a key and print it; it is not shown again."""
    secret, key = _key_store(home).create(name, scope or ("search", "fetch"), monthly_quota)
    print(json.dumps({"key": secret, "id": key.id, "scopes": sorted(key.scopes)}))


@keys_app.command("list")
def keys_list(home: Home = None) -> None:
    """Live keys, without their secrets."""
    rows = [
        {"id": k.id, "prefix": k.prefix, "name": k.name, "scopes": sorted(k.scopes)}
        for k in _key_store(home).all()
    ]
    print(json.dumps(rows, indent=2))


@keys_app.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="`key_...`, as `keys list` shows it.")],
    home: Home = None,
) -> None:
    """Make a key unusable."""
    if not _key_store(home).revoke(key_id):
        raise InvalidRequestError("not_found", f"no live key has the id {key_id}")
    print(json.dumps({"revoked": key_id}))


def _key_store(home: Path | None) -> KeyStore:
    from deepinfer_search_fetch.service.auth import KeyStore
    from deepinfer_search_fetch.service.run import KEYS_FILE

    return KeyStore(_home(home) / KEYS_FILE)


def _home(home: Path | None) -> Path:
    from deepinfer_search_fetch.database import private_folder

    return private_folder(make_config(home).home)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
