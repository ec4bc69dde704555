"""Where log lines go. Apart from `serve`, whose web framework a worker does without."""

from __future__ import annotations

import logging
import sys


def setup_logging(level: str) -> None:
    """One line an event, on standard error."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        force=True,
    )
    for chatty in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
