"""A worker process on the toy runner: `python toy_worker.py ROLE LISTEN CACHE_DIR STEP_DELAY_S`.

Prints its address as one line when it listens. The cluster key comes from the environment; with
TOY_WRITES units go by Mooncake's one-sided writes. After so many of them the first worker that can
make the file TOY_STUCK says "stuck" and stays in the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from toy_engine import TOY

from deepinfer_engine.adapters.kvtier import open_store
from deepinfer_engine.core.toy_runner import ToyRunner
from deepinfer_engine.pd import sending
from deepinfer_engine.pd.decode import serve_decode
from deepinfer_engine.pd.prefill import serve_prefill
from deepinfer_engine.pd.remote_writes import RemoteWrites


class SlowRunner(ToyRunner):
    """Decode steps take a while, so that a test can act while a stream runs."""

    delay_s = 0.0

    def decode(self, rows: Any) -> Any:
        time.sleep(self.delay_s)
        return super().decode(rows)


class SomeWrites(RemoteWrites):
    before_stuck = -1

    def write(self, *args: Any) -> bool:
        self.before_stuck -= 1
        if self.before_stuck == -1:
            with contextlib.suppress(FileExistsError):
                Path(os.environ["TOY_STUCK"]).touch(exist_ok=False)
                print("stuck", flush=True)
                time.sleep(600)
        return super().write(*args)


def main() -> None:
    role, listen, cache_dir, delay = sys.argv[1:]
    runner = SlowRunner(**TOY)
    runner.delay_s = float(delay)
    store = open_store(Path(cache_dir), runner.layout)
    serve = {"prefill": serve_prefill, "decode": serve_decode}[role]
    key = os.environ["TOY_CLUSTER_KEY"].encode()
    writes = None
    if "TOY_WRITES" in os.environ:
        sending.UNIT_BYTES = runner.layout.block_bytes
        writes = SomeWrites("127.0.0.1")
        writes.before_stuck = int(os.environ["TOY_WRITES"])

    def ready(address: str) -> None:
        print(address, flush=True)

    asyncio.run(serve(runner, store, listen, cluster_key=key, writes=writes, ready=ready))


if __name__ == "__main__":
    main()
