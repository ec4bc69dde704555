"""An encode worker on the toy's tower: `python encode_worker.py PASS_S`. Prints its address."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from seeing_toy import SAME, ToyEncoder

from deepinfer_engine.pd.encode import serve_encode


def ready(address: str) -> None:
    print(address, flush=True)


if __name__ == "__main__":
    encoder = ToyEncoder(pass_s=float(sys.argv[1]))
    key = os.environ["TOY_CLUSTER_KEY"].encode()
    asyncio.run(serve_encode(encoder, "127.0.0.1:0", cluster_key=key, identity=SAME, ready=ready))
