"""Options that several commands share, and the configuration they make."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

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
_FROM_ENVIRONMENT = {
    "searxng_url": "DEEPINFER_SEARCH_FETCH_SEARXNG_URL",
    "brave_key": "DEEPINFER_SEARCH_FETCH_BRAVE_KEY",
    "egress_proxy": "DEEPINFER_SEARCH_FETCH_EGRESS_PROXY",
}
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole record as JSON.")]


def make_config(
    home: Path | None, cidrs: list[str] | None = None, ports: list[int] | None = None
) -> Config:
    """The configuration of one command, upstream search engines and the
    outgoing proxy from the environment (a key on the
    command line could be read by every user of the machine).

    Raises InvalidRequestError for a malformed network or address.
    """
    values: dict[str, Any] = {} if home is None else {"home": home}
    for name, variable in _FROM_ENVIRONMENT.items():
        if os.environ.get(variable):
            values[name] = os.environ[variable]
    try:
        config = Config(**values)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        where = _FROM_ENVIRONMENT.get(name, name)
        raise InvalidRequestError(
            "invalid_argument", f"{where}: {error.errors()[0]['msg']}"
        ) from None
    for cidr in cidrs or ():
        try:
            ipaddress.ip_network(cidr)
        except ValueError as error:
            raise InvalidRequestError("invalid_argument", f"--allow-cidr {cidr}: {error}") from None
    return config.model_copy(
        update={"allow_cidrs": tuple(cidrs or ()), "ports": (*config.ports, *(ports or ()))}
    )
