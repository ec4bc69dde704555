"""A supervised worker on the toy runner: `python soak_worker.py ROLE --listen ADDRESS`.

The cache in `SOAK_CACHE` is shared: decode loads what is cached of a prompt by itself.
Holds answers to schemas where xgrammar is installed, with little time for each.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from seeing_toy import RULES, SAME, SeeingToy, ToyEncoder

from deepinfer_engine.adapters.kvtier import StoreSettings, open_store
from deepinfer_engine.codec.choose import open_grammars
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.grammars import GrammarCompiler
from deepinfer_engine.demo import demo_path
from deepinfer_engine.errors import ConstraintsUnavailable
from deepinfer_engine.pd.decode import serve_decode
from deepinfer_engine.pd.encode import serve_encode
from deepinfer_engine.pd.prefill import serve_prefill
from deepinfer_engine.pd.supervise import beat, cluster_key_from_environ, die_with_parent, notify

GRAMMAR_S = 4.0
END = 1
IMAGE = 10
"""Of the demo's tokenizer."""
SEES = replace(RULES, image_token_id=IMAGE)
EMBEDDINGS = 1 << 10
"""Kept: a few pictures, so that most are encoded."""


class PacedRunner(SeeingToy):
    """Steps as long as a small model's, so that faults meet requests that run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Grammars end with the token that ends answers in the codec's vocabulary.
        self._caps = replace(self._caps, eos_token_ids=(END,))

    def decode(self, rows: Any) -> Any:
        time.sleep(0.004)
        return super().decode(rows)


def grammars(runner: SeeingToy) -> GrammarCompiler | None:
    try:
        return open_grammars(demo_path(), runner.caps.vocab_size, timeout_s=GRAMMAR_S)
    except ConstraintsUnavailable:
        return None


def main() -> None:
    die_with_parent()
    logging.basicConfig(level="ERROR")
    role, _, listen = sys.argv[1:]
    common: dict[str, Any] = {
        "cluster_key": cluster_key_from_environ(os.environ),
        "identity": SAME,
        "looked": beat,
        "ready": lambda address: notify("ready", address=address),
    }
    if role == "encode":
        encoder = ToyEncoder(pass_s=0.02, rules=SEES)
        uvloop.run(serve_encode(encoder, listen, cache_bytes=EMBEDDINGS, **common))
        return
    runner = PacedRunner(
        rules=SEES,
        num_blocks=512,
        num_state_slots=64,
        block_tokens=16,
        vocab_size=1536,
        max_model_len=2048,
    )
    # A low rate of computing: what is cached is loaded, however slow the disk of a busy machine.
    cache = StoreSettings(Path(os.environ["SOAK_CACHE"]), prefill_rate=1.0)
    store = open_store(cache, runner.layout)
    if role == "prefill":
        encoding = {"encoding": "workers", "picture_cache_bytes": EMBEDDINGS}
        serve = partial(serve_prefill, loads_stored=True, **encoding)
    else:
        serve = partial(serve_decode, grammars=grammars(runner))
    uvloop.run(serve(runner, store, listen, config=EngineConfig(), **common))


if __name__ == "__main__":
    main()
