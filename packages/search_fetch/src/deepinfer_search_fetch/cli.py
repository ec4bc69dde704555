"""The `search-fetch` command. Every error is one line on stderr: exit 2 for usage, 1 otherwise."""

from __future__ import annotations

import ipaddress
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from deepinfer_search_fetch import __version__
from deepinfer_search_fetch.cli_options import AllowCidr, AllowPort, AsJson, Home, make_config
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.index_cli import register

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Search and Fetch for agents.")
keys_app = typer.Typer(no_args_is_help=True, help="API keys of the service.")
index_app = typer.Typer(no_args_is_help=True, help="The index.")
app.add_typer(keys_app, name="keys")
app.add_typer(index_app, name="index")
register(app)


@app.command()
def fetch(
    url: str,
    home: Home = None,
    allow_cidr: AllowCidr = None,
    allow_port: AllowPort = None,
    as_json: AsJson = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the Markdown as it is.")] = False,
    mode: Annotated[str, typer.Option(help="article, full or fast.")] = "article",
    max_tokens: Annotated[int, typer.Option(min=1, max=200_000)] = 16_000,
    offset: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Read one URL as clean Markdown."""
    from deepinfer_search_fetch.client import SearchFetch
    from deepinfer_search_fetch.models import FetchRequest

    request = _validated(
        FetchRequest, url=url, mode=mode, max_tokens=max_tokens, offset=offset, render="never"
    )
    # One page does not repay the start of a worker process.
    config = make_config(home, allow_cidr, allow_port).model_copy(update={"extract_workers": 0})
    with SearchFetch(config) as client:
        response = client.fetch(request)
    if as_json:
        print(response.model_dump_json(by_alias=True, indent=2))
    elif raw or not sys.stdout.isatty():
        print(response.content, end="")
    else:
        from rich.console import Console
        from rich.markdown import Markdown

        console = Console()
        console.print(f"[bold]{response.title or response.url}[/bold]")
        console.print(f"[dim]{response.final_url} · {response.tokens.total} tokens[/dim]\n")
        console.print(Markdown(response.content))


@app.command()
def search(
    query: str,
    home: Home = None,
    as_json: AsJson = False,
    count: Annotated[int, typer.Option(min=1, max=50)] = 10,
) -> None:
    """Search the index."""
    from rich.console import Console
    from rich.text import Text

    from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
    from deepinfer_search_fetch.models import SearchRequest
    from deepinfer_search_fetch.search.engine import search as run
    from deepinfer_search_fetch.search.parts import parts_of

    request = _validated(SearchRequest, query=query, count=count)
    config = make_config(home)
    response = run(TantivyBackend(config.home / "index"), request, parts=parts_of(config))
    if as_json:
        print(response.model_dump_json(by_alias=True, indent=2))
        return
    console = Console()
    for r in response.results:
        console.print(Text(f"{r.rank}. {r.title}", style="bold"))
        console.print(
            Text(
                f"   {r.url}  relevance {r.relevance:.2f}  authority {r.authority.score:.2f}", "dim"
            )
        )
        text = Text("   " + r.snippet)
        for start, end in r.highlights:
            text.stylize("bold yellow", start + 3, end + 3)
        console.print(text)
    if not response.results:
        print("nothing found" + (" (the index is empty)" if response.warnings else ""))


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8900,
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
    """Run the REST service."""
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
    run_service(config, chosen, host, port, with_keys=not no_auth)


@app.command()
def mcp(home: Home = None, allow_cidr: AllowCidr = None, allow_port: AllowPort = None) -> None:
    """Serve web_search and web_fetch over MCP on stdin and stdout (needs the `mcp` extra)."""
    from deepinfer_search_fetch.service.mcp import run_stdio

    run_stdio(make_config(home, allow_cidr, allow_port))


@app.command()
def usage(home: Home = None) -> None:
    """Sums of the ledger per key and endpoint."""
    from deepinfer_search_fetch.service.metering import Ledger

    config = make_config(home, None, None)
    config.home.mkdir(parents=True, exist_ok=True)
    print(json.dumps(Ledger(config.home / "ledger.sqlite3").usage(), indent=2))


@keys_app.command("create")
def keys_create(
    name: str,
    home: Home = None,
    scope: Annotated[list[str] | None, typer.Option(help="search, fetch, ingest or admin.")] = None,
    monthly_quota: Annotated[int | None, typer.Option(min=1)] = None,
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
def keys_revoke(key_id: str, home: Home = None) -> None:
    """Make a key unusable."""
    if not _key_store(home).revoke(key_id):
        raise InvalidRequestError("not_found", f"no live key has the id {key_id}")
    print(json.dumps({"revoked": key_id}))


@index_app.command("stats")
def index_stats(home: Home = None) -> None:
    """Number of pages and the generation."""
    from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend

    backend = TantivyBackend(make_config(home, None, None).home / "index")
    print(json.dumps({"documents": backend.size(), "generation": backend.generation()}))


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Search and Fetch for agents."""


def _key_store(home: Path | None) -> Any:
    from deepinfer_search_fetch.service.auth import KeyStore

    config = make_config(home, None, None)
    config.home.mkdir(parents=True, exist_ok=True)
    return KeyStore(config.home / "keys.sqlite3")


def _validated(model: Callable[..., Any], **values: Any) -> Any:
    from pydantic import ValidationError

    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(p) for p in first["loc"])
        raise InvalidRequestError("invalid_argument", f"{name}: {first['msg']}") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main() -> NoReturn:
    """Console entry point."""
    try:
        app()
    except SearchFetchError as error:
        print(f"search-fetch: {error.code}: {error.message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InvalidRequestError) else 1)
    except OSError as error:
        print(f"search-fetch: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
