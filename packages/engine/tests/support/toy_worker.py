"""A worker process on the toy runner: `python toy_worker.py ROLE LISTEN CACHE_DIR STEP_DELAY_S`.

Prints its address as one line when it listens. The cluster key comes from the environment.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from toy_engine import TOY

from deepinfer_engine.adapters.kvtier import open_store
from deepinfer_engine.core.toy_runner import ToyRunner
from deepinfer_engine.pd.decode import serve_decode
from deepinfer_engine.pd.prefill import serve_prefill


class SlowRunner(ToyRunner):
    """Decode steps take a while, so that a test can act while a stream runs."""

    delay_s = 0.0

    def decode(self, rows: Any) -> Any:
        time.sleep(self.delay_s)
        return super().decode(rows)


def main() -> None:
    role, listen, cache_dir, delay = sys.argv[1:]
    runner = SlowRunner(**TOY)
    runner.delay_s = float(delay)
    store = open_store(Path(cache_dir), runner.layout)
    serve = {"prefill": serve_prefill, "decode": serve_decode}[role]
    key = os.environ["TOY_CLUSTER_KEY"].encode()
    asyncio.run(serve(runner, store, listen, cluster_key=key, ready=lambda a: print(a, flush=True)))


if __name__ == "__main__":
    main()
