"""Options that several commands share, and the configuration they make."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_search_fetch.config import Config
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


def make_config(
    home: Path | None, cidrs: list[str] | None = None, ports: list[int] | None = None
) -> Config:
    """The configuration of one command. Raises InvalidRequestError for a malformed network."""
    values: dict[str, Any] = {} if home is None else {"home": home}
    config = Config(**values)
    for cidr in cidrs or ():
        try:
            ipaddress.ip_network(cidr)
        except ValueError as error:
            raise InvalidRequestError("invalid_argument", f"--allow-cidr {cidr}: {error}") from None
    return config.model_copy(
        update={"allow_cidrs": tuple(cidrs or ()), "ports": (*config.ports, *(ports or ()))}
    )
