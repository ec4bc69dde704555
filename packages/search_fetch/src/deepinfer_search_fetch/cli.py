"""The `search-fetch` command. Every error is one line on stderr: exit 2 for usage, 1 otherwise."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from deepinfer_search_fetch import __version__, service_cli
from deepinfer_search_fetch.cli_options import (
    COMMON,
    AllowCidr,
    AllowPort,
    AsJson,
    CommonOptions,
    Home,
    configured,
    make_config,
)
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.index_cli import register

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Search and Fetch for agents.")
index_app = typer.Typer(no_args_is_help=True, help="The index.")
config_app = typer.Typer(no_args_is_help=True, help="The settings.")
app.add_typer(index_app, name="index")
app.add_typer(config_app, name="config")
register(app)
service_cli.register(app)


Render = Annotated[
    str, typer.Option(help="auto, never or always; needs a Chromium on this machine.")
]


@app.command()
def fetch(
    url: Annotated[str, typer.Argument(help="The page; http or https.")],
    home: Home = None,
    allow_cidr: AllowCidr = None,
    allow_port: AllowPort = None,
    as_json: AsJson = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the Markdown as it is.")] = False,
    mode: Annotated[str, typer.Option(help="article, full or fast.")] = "article",
    form: Annotated[
        str, typer.Option("--format", help="markdown, text, html, outline, links or raw_text.")
    ] = "markdown",
    selector: Annotated[str | None, typer.Option(help="CSS of the part to read.")] = None,
    render: Render = "auto",
    max_age: Annotated[
        int, typer.Option(min=0, help="Seconds a cached page may be old; 0 asks the site again.")
    ] = 86_400,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=200_000, help="Tokens of Markdown; --offset reads on.")
    ] = 16_000,
    offset: Annotated[int, typer.Option(min=0, help="Where to go on in a long page.")] = 0,
) -> None:
    """Read one URL as clean Markdown: laid out on a terminal, as it is in a pipe."""
    from deepinfer_search_fetch import terminal
    from deepinfer_search_fetch.client import SearchFetch
    from deepinfer_search_fetch.models import FetchRequest

    request = _validated(
        FetchRequest,
        url=url,
        mode=mode,
        format=form,
        selector=selector,
        render=render,
        max_age=max_age,
        max_tokens=max_tokens,
        offset=offset,
    )
    # One page does not repay the start of a worker process.
    config = make_config(home, allow_cidr, allow_port).model_copy(update={"extract_workers": 0})
    with SearchFetch(config) as client:
        response = client.fetch(request)
    if as_json:
        print(response.model_dump_json(by_alias=True, indent=2))
    elif raw or not sys.stdout.isatty():
        print(terminal.plain(response), end="")
    else:
        terminal.show_page(response)


@app.command()
def batch(
    file: Annotated[Path, typer.Argument(help="One URL a line; - for standard input.")],
    home: Home = None,
    allow_cidr: AllowCidr = None,
    allow_port: AllowPort = None,
    mode: Annotated[str, typer.Option(help="article, full or fast.")] = "article",
    render: Render = "auto",
    max_tokens: Annotated[
        int, typer.Option(min=1, max=200_000, help="Tokens of Markdown a page.")
    ] = 16_000,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Pages at work at once.")] = 4,
) -> None:
    """Read many URLs; one JSON line each as they finish, `index` is the line of the file.

    Exits with 1 when any of them failed.
    """
    import asyncio

    from deepinfer_search_fetch.client import AsyncSearchFetch
    from deepinfer_search_fetch.models import FetchRequest

    text = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    requests = [
        _validated(FetchRequest, url=line.strip(), mode=mode, render=render, max_tokens=max_tokens)
        for line in text.splitlines()
        if line.strip()
    ]

    async def run() -> int:
        failed = 0
        async with AsyncSearchFetch(make_config(home, allow_cidr, allow_port)) as client:
            async for item in client.fetch_many(requests, concurrency=concurrency):
                failed += not item.ok
                print(item.model_dump_json(by_alias=True, exclude_none=True), flush=True)
        return failed

    if asyncio.run(run()):
        raise typer.Exit(1)


@app.command()
def search(
    query: Annotated[
        str, typer.Argument(help='Words, "phrases", -word, site:example.org; quote the whole.')
    ],
    home: Home = None,
    as_json: AsJson = False,
    count: Annotated[int, typer.Option(min=1, max=50, help="Results to show.")] = 10,
    offset: Annotated[int, typer.Option(min=0, max=500, help="Results to pass over.")] = 0,
    freshness: Annotated[
        str | None, typer.Option(help="day, week, month, year or YYYY-MM-DD..YYYY-MM-DD.")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="index, upstream:searxng, upstream:brave; repeatable.")
    ] = None,
) -> None:
    """Search the index, and upstream engines where --source names them."""
    from deepinfer_search_fetch import terminal
    from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
    from deepinfer_search_fetch.models import SearchRequest
    from deepinfer_search_fetch.search.engine import search as run
    from deepinfer_search_fetch.search.parts import parts_of

    request = _validated(
        SearchRequest,
        query=query,
        count=count,
        offset=offset,
        freshness=freshness,
        sources=source or ["index"],
    )
    config = make_config(home)
    response = run(TantivyBackend(config.home / "index"), request, parts=parts_of(config))
    if as_json:
        print(response.model_dump_json(by_alias=True, indent=2))
    else:
        terminal.show_results(response)


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


@config_app.command("show")
def config_show(
    home: Home = None,
    allow_cidr: AllowCidr = None,
    allow_port: AllowPort = None,
    as_json: AsJson = False,
) -> None:
    """Every setting: its value and where it comes from; secrets are not shown."""
    found = configured(home, allow_cidr, allow_port)
    rows = found.rows()
    if as_json:
        print(json.dumps({n: {"value": v, "source": s} for n, v, s in rows}, indent=2))
        return
    for name, value, source in rows:
        print(f"{name} = {json.dumps(value, ensure_ascii=False)}  # {source}")


@app.callback()
def root(
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file; config.toml of the home folder.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value of any setting; repeatable. See `config show`."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Search and Fetch for agents."""
    COMMON.set(CommonOptions(config, tuple(settings or ())))


def _validated(model: Callable[..., Any], **values: Any) -> Any:
    from pydantic import ValidationError

    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(p) for p in first["loc"])
        raise InvalidRequestError("invalid_argument", f"{name}: {first['msg']}") from None


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
