"""Options that several commands share, and the configuration they make."""

from __future__ import annotations

import ipaddress
import os
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_search_fetch.config import Config
from deepinfer_search_fetch.config_sources import Configured, configure
from deepinfer_search_fetch.errors import InvalidRequestError

Home = Annotated[
    Path | None, typer.Option("--home", help="Folder of index, cache, keys and ledger.")
]
AllowCidr = Annotated[
    list[str] | None, typer.Option("--allow-cidr", help="Network the guard shall allow (operator).")
]
AllowPort = Annotated[
    list[int] | None, typer.Option("--allow-port", help="Port the guard shall allow (operator).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole record as JSON.")]


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """Options in front of the command: `search-fetch --config FILE --set name=value COMMAND`."""

    file: Path | None = None
    settings: tuple[str, ...] = ()


COMMON: ContextVar[CommonOptions | None] = ContextVar("search_fetch_options", default=None)


def configured(
    home: Path | None, cidrs: list[str] | None = None, ports: list[int] | None = None
) -> Configured:
    """The configuration of this command, and where every value comes from.

    Raises InvalidRequestError naming the file, variable or option that is wrong.
    """
    common = COMMON.get() or CommonOptions()
    for cidr in cidrs or ():
        try:
            ipaddress.ip_network(cidr)
        except ValueError as error:
            raise InvalidRequestError("invalid_argument", f"--allow-cidr {cidr}: {error}") from None
    found = configure({"home": home}, common.settings, file=common.file, environ=os.environ)
    # These two add to what is allowed elsewhere.
    config = found.config.model_copy(
        update={
            "allow_cidrs": (*found.config.allow_cidrs, *(cidrs or ())),
            "ports": (*found.config.ports, *(ports or ())),
        }
    )
    sources = dict(found.sources)
    sources.update({name: "flag" for name, v in (("allow_cidrs", cidrs), ("ports", ports)) if v})
    return Configured(config, sources, found.file)


def make_config(
    home: Path | None, cidrs: list[str] | None = None, ports: list[int] | None = None
) -> Config:
    """`configured`, the configuration alone."""
    return configured(home, cidrs, ports).config
