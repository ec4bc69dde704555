"""A server to kill: HTTP with prices and a ledger, over an engine that answers at once.

    python ledger_server.py LEDGER

Tells its URL as one line on standard output; ends at end of file on its input.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from server_fakes import FakeEngine, Script, byte_codec

from deepinfer_engine.server.app import create_app
from deepinfer_engine.server.run import bind, listening, url_of
from deepinfer_engine.settings import Settings


async def main(ledger: Path) -> None:
    codec = byte_codec()
    ids = codec.tokenize("An answer of some length, in steps.")
    steps = [ids[i : i + 4] for i in range(0, len(ids), 4)]
    settings = Settings(ledger=ledger, prices="published", priced_as="deepseek-flash")
    app = create_app(FakeEngine(Script([*steps, [1]], cached=2)), codec, settings)
    sock = bind("127.0.0.1", 0)
    async with listening(app, sock, 0):
        print(url_of(sock), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
