"""The server of a soak: HTTP and router here, two prefill, decode and encode workers below it.

    python soak_server.py [TIMEOUT_S]

Tells its URL as one line on standard output; ends at end of file on its input. The time is that
of headers, bodies and slow readers.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import secrets
import sys
import tempfile
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from soak_worker import SEES

from deepinfer_engine.adapters.recipe import Tokenizer
from deepinfer_engine.codec.pictures import PictureIntake, PicturePolicy
from deepinfer_engine.codec.recipe_codec import RecipeCodec
from deepinfer_engine.demo import demo_path
from deepinfer_engine.pd.supervise import CLUSTER_KEY_ENV, ChildSpec, Supervisor
from deepinfer_engine.router.remote import RemoteEngine
from deepinfer_engine.server.app import create_app
from deepinfer_engine.server.run import bind, give_large_blocks_back, listening, url_of
from deepinfer_engine.settings import Settings

ROLES = {f"{role}-{i}": role for role in ("prefill", "decode", "encode") for i in (1, 2)}

PR_SET_CHILD_SUBREAPER = 36


async def main(timeout_s: float, cache: str) -> None:
    # What a killed worker leaves behind comes to this process, where it is seen.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    key, addresses, engine = secrets.token_bytes(32), {}, None
    script = str(Path(__file__).parent / "soak_worker.py")

    def there() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {role: [] for role in ROLES.values()}
        for name, address in addresses.items():
            found[ROLES[name]].append(address)
        return found

    def hear(name, notice):
        if notice["event"] == "ready" and addresses.get(name) != notice["address"]:
            addresses[name] = notice["address"]
            if engine is not None:
                engine.set_workers(**there())

    supervisor = Supervisor(
        [ChildSpec(name, [sys.executable, script, role]) for name, role in ROLES.items()],
        environ={**os.environ, CLUSTER_KEY_ENV: key.hex(), "SOAK_CACHE": cache},
        on_notice=hear,
        silence_s=5.0,
    )
    await supervisor.start(120)
    engine = await RemoteEngine.connect(**there(), cluster_key=key, ready_timeout_s=60)
    sees = PictureIntake(SEES, PicturePolicy())
    path = demo_path() / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    codec = RecipeCodec(tokenizer, ("toy",), pictures=sees, tokenizer_path=path)
    settings = Settings(
        slow_reader_timeout_s=timeout_s, header_timeout_s=timeout_s, body_timeout_s=timeout_s
    )
    give_large_blocks_back()
    sock = bind("127.0.0.1", 0)
    async with listening(create_app(engine, codec, settings), sock, 0):
        print(url_of(sock), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await engine.close()
    await supervisor.kill()


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("SOAK_LOG", "CRITICAL"), stream=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0, folder))
