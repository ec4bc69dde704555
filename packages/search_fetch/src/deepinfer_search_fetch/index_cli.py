"""Commands of the index: `ingest`, `authority`, `dense`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from deepinfer_search_fetch.cli_options import AllowCidr, AllowPort, Home, make_config
from deepinfer_search_fetch.errors import InvalidRequestError


class _SourceOrCommand(TyperGroup):
    """`ingest PLACE` beside `ingest KIND PLACE`: what names no command is a place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["auto", *args]
        return super().parse_args(ctx, args)


ingest_app = typer.Typer(
    cls=_SourceOrCommand,
    no_args_is_help=True,
    help="Bring pages into the index: `ingest PLACE` guesses what PLACE is.",
)
authority_app = typer.Typer(no_args_is_help=True, help="Source authority.")
dense_app = typer.Typer(no_args_is_help=True, help="Vectors for the re-ranker.")


def register(app: typer.Typer) -> None:
    """Add these commands to the main one."""
    app.add_typer(ingest_app, name="ingest")
    app.add_typer(authority_app, name="authority")
    app.add_typer(dense_app, name="dense")


@ingest_app.command("auto", hidden=True)
def ingest_auto(
    place: Annotated[str, typer.Argument(help="A URL, file or folder.")],
    home: Home = None,
    allow_cidr: AllowCidr = None,
    allow_port: AllowPort = None,
    kind: Annotated[str | None, typer.Option(help="One of the other commands' names.")] = None,
) -> None:
    """A URL, a file or folder, a .jsonl or .warc file, or a sitemap (a URL that ends in .xml)."""
    _ingest(place, kind, home, allow_cidr, allow_port)


def _plain_command(kind: str, help_text: str, places: str) -> Callable[..., None]:
    def command(
        place: str,
        home: Home = None,
        allow_cidr: AllowCidr = None,
        allow_port: AllowPort = None,
    ) -> None:
        _ingest(place, kind, home, allow_cidr, allow_port)

    # As text it would be read where nobody knows `places`.
    command.__annotations__["place"] = Annotated[str, typer.Argument(help=places)]
    command.__doc__ = help_text
    return command


for _kind, _help, _places in (
    ("url", "One page.", "Its URL."),
    ("file", "A file, or every readable file below a folder.", "The file or folder."),
    (
        "sitemap",
        "The pages of a sitemap or sitemap index; unchanged ones (lastmod) are skipped.",
        "The sitemap's URL.",
    ),
    ("feed", "The pages an RSS, Atom or RDF feed links to.", "The feed's URL."),
    ("warc", "The pages of a web archive (.warc, .warc.gz, .warc.zst).", "The archive file."),
    (
        "jsonl",
        "Lines of JSON: url, title, text, and optionally language, published, site_name.",
        "The file, plain or gzip.",
    ),
):
    ingest_app.command(_kind)(_plain_command(_kind, _help, _places))


@ingest_app.command("crawl")
def ingest_crawl(
    seed: Annotated[str, typer.Argument(help="URL of the page to begin with.")],
    home: Home = None,
    allow_cidr: AllowCidr = None,
    allow_port: AllowPort = None,
    max_pages: Annotated[int, typer.Option(min=1, help="Pages in all.")] = 1000,
    depth: Annotated[int, typer.Option(min=0, help="Links from the seed.")] = 3,
    per_domain: Annotated[int, typer.Option(min=1, help="URLs of one domain.")] = 500,
    scope: Annotated[str, typer.Option(help="host, domain or any.")] = "domain",
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Pages at work at once.")] = 4,
) -> None:
    """Follow links from a page. Run again after an interruption, it goes on where it was."""
    from deepinfer_search_fetch.index.sources.crawl import CrawlOptions

    if scope not in ("host", "domain", "any"):
        raise InvalidRequestError("invalid_argument", f"--scope {scope} is not host, domain, any")
    options = CrawlOptions(max_pages, depth, per_domain, scope, concurrency)
    _ingest(seed, "crawl", home, allow_cidr, allow_port, options)


def _ingest(
    place: str,
    kind: str | None,
    home: Path | None,
    cidrs: list[str] | None,
    ports: list[int] | None,
    crawl: Any = None,
) -> None:
    from deepinfer_search_fetch.client import SearchFetch
    from deepinfer_search_fetch.index.ingest import SOURCE_KINDS

    if kind is not None and kind not in SOURCE_KINDS:
        raise InvalidRequestError(
            "invalid_argument", f"--kind {kind} is not one of {', '.join(SOURCE_KINDS)}"
        )
    with SearchFetch(make_config(home, cidrs, ports)) as client, _progress(place) as report:
        done = client.ingest(place, cast(Any, kind), crawl=crawl, progress=report)
    print(done.model_dump_json(indent=2))


@contextmanager
def _progress(label: str) -> Generator[Callable[[int, int], None] | None]:
    """A line on stderr that counts pages; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(label[:60]), total=None)

        def report(seen: int, written: int) -> None:
            text = f"{escape(label[:60])}  {seen} seen, {written} written"
            bar.update(task, description=text)

        yield report


@authority_app.command("build")
def authority_build(home: Home = None) -> None:
    """Rank the hosts of the link graph that crawls and ingestion left."""
    from deepinfer_search_fetch.index.linkgraph import build_authority

    folder = make_config(home).home
    if not (folder / "links.sqlite3").exists():
        raise InvalidRequestError(
            "not_found", f"{folder} holds no link graph; ingest or crawl pages first"
        )
    counts = build_authority(folder / "links.sqlite3", folder / "authority.sqlite3")
    print(json.dumps(counts))


@authority_app.command("import")
def authority_import(
    file: Annotated[Path, typer.Argument(help="The ranks file as Common Crawl publishes it.")],
    home: Home = None,
    top: Annotated[int, typer.Option(min=1, help="Rows to keep.")] = 1_000_000,
    hosts: Annotated[
        int | None, typer.Option(min=1, help="Hosts in the whole release; counted if not given.")
    ] = None,
) -> None:
    """Import Common Crawl's host or domain ranks (tab-separated, gzip allowed)."""
    from deepinfer_search_fetch.index.commoncrawl import import_ranks

    stored = import_ranks(file, make_config(home).home / "authority.sqlite3", top=top, hosts=hosts)
    print(json.dumps({"hosts": stored}))


@authority_app.command("explain")
def authority_explain(
    host_or_url: Annotated[str, typer.Argument(help="Whose authority; it is not asked.")],
    home: Home = None,
) -> None:
    """Every input of the authority formula for a host or URL."""
    from deepinfer_search_fetch.search.parts import authorities_of

    value, inputs = authorities_of(make_config(home)).explain(host_or_url)
    print(json.dumps({**value.model_dump(), **inputs}, indent=2, ensure_ascii=False))


@dense_app.command("learn")
def dense_learn(
    home: Home = None,
    dimensions: Annotated[
        int, typer.Option(min=8, max=1024, help="Numbers of each word's vector.")
    ] = 128,
    pages: Annotated[int, typer.Option(min=3, help="Read at most so many pages.")] = 50_000,
) -> None:
    """Learn word vectors from the indexed pages; searches then re-rank with them."""
    from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
    from deepinfer_search_fetch.search.dense import StaticTable

    folder = make_config(home).home
    backend = TantivyBackend(folder / "index")
    texts = [f"{page.title}\n{page.content[:4000]}" for page in backend.pages(pages)]
    StaticTable.learn(texts, dimensions=dimensions).save(folder / "vectors.npz")
    print(json.dumps({"pages": len(texts), "file": str(folder / "vectors.npz")}))
