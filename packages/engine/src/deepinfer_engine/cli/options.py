"""Options that several commands have, each declared once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

HERE = "http://127.0.0.1:8000"
"""Where `deepinfer serve` listens unless it is told otherwise."""


def _with_scheme(url: str | None) -> str | None:
    """`host:port` alone is meant as http."""
    return url if url is None or "://" in url else f"http://{url}"


ServerUrl = Annotated[
    str, typer.Argument(callback=_with_scheme, help=f"The server, such as {HERE}.")
]
ServerKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="DEEPINFER_API_KEY", help="Key of that server."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def server_option(text: str) -> Any:
    """`--url` of a command that also works without a server."""
    return typer.Option("--url", callback=_with_scheme, help=text)


def bearer(key: str | None) -> dict[str, str]:
    """The header that shows a server its key."""
    return {"Authorization": f"Bearer {key}"} if key else {}
