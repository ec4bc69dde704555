"""The toy with eyes: a runner whose tokens depend on the rows of pictures, and a tower for it.

A picture's rows are a hash of its pixels; the runner reads nothing else of it. Pixels that begin
with `POISON` end the tower's process, with `SICK` they make it raise.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from deepinfer_engine.core.pictures import Picture, PictureRules, RowForm, place
from deepinfer_engine.core.runner import PrefillChunk
from deepinfer_engine.core.toy_runner import ToyRunner
from deepinfer_engine.core.types import GenerateRequest, SamplingParams
from deepinfer_engine.pd.peers import ModelIdentity

IMAGE = 7
RULES = PictureRules(IMAGE, patch=14, cell=3, max_tokens=64, min_pixels=196, channels=6)
SAME = ModelIdentity("the toy", "float64")
FORM = RowForm(RULES, "float64", SAME.model)
SIDE = 84
PIXELS = 3 * SIDE * SIDE
SICK, POISON = b"SICK", b"POISON"


def rows_of(picture: Picture) -> memoryview:
    seed = int.from_bytes(hashlib.blake2b(picture.pixels, digest_size=8).digest(), "little")
    rows = np.random.default_rng(seed).random((picture.length, RULES.channels))
    return memoryview(bytearray(rows.tobytes()))


class ToyEncoder:
    """Implements `pd.encode_queue.Encoder`. With `hold` passes wait until `gate` is set."""

    def __init__(
        self, *, hold: bool = False, pass_s: float = 0.0, rules: PictureRules = RULES
    ) -> None:
        self.rules = rules
        self.gate, self.entered = threading.Event(), threading.Event()
        self.pass_s = pass_s
        self.batches: list[int] = []
        if not hold:
            self.gate.set()

    def encode(self, pictures: Sequence[Picture]) -> list[memoryview]:
        self.entered.set()
        assert self.gate.wait(60), "the test never opened the gate"
        time.sleep(self.pass_s)
        self.batches.append(len(pictures))
        for picture in pictures:
            if picture.pixels.startswith(POISON):
                os.kill(os.getpid(), signal.SIGKILL)
            if picture.pixels.startswith(SICK):
                raise ValueError("this picture cannot be encoded")
        return [rows_of(picture) for picture in pictures]


class SeeingToy(ToyRunner):
    """Each token of a picture counts as what its row hashes to. `tower`: it has one itself."""

    def __init__(self, *, tower: bool = False, rules: PictureRules = RULES, **options: Any) -> None:
        super().__init__(**{"vocab_size": 320, **options, "lookback": 0})
        self._caps = replace(self._caps, pictures=rules)
        self._tower = tower

    def prefill(self, chunks: Sequence[PrefillChunk]) -> Any:
        return super().prefill([self._seen(chunk) for chunk in chunks])

    def _seen(self, chunk: PrefillChunk) -> PrefillChunk:
        ids = np.array(chunk.token_ids)
        for picture in chunk.pictures:
            assert picture.rows is not None or self._tower, "a picture without rows"
            rows = rows_of(picture) if picture.rows is None else picture.rows
            size = FORM.row_bytes
            assert len(rows) == picture.length * size
            low, high = max(picture.start, chunk.start), min(picture.end, chunk.start + len(ids))
            for at in range(low, high):
                row = bytes(rows[(at - picture.start) * size :][:size])
                ids[at - chunk.start] = 1000 + int.from_bytes(
                    hashlib.blake2b(row, digest_size=4).digest(), "little"
                )
        return replace(chunk, token_ids=ids)


def pixels(seed: int, mark: bytes = b"") -> bytes:
    data = np.random.default_rng(seed).integers(0, 256, PIXELS, np.uint8).tobytes()
    return mark + data[len(mark) :]


def seen(
    name: str, *images: int, mark: bytes = b"", text: int = 11, **options: Any
) -> GenerateRequest:
    """A request with these pictures, each behind the same few words."""
    words = [t for t in np.random.default_rng(3).integers(10, 250, 400).tolist() if t != IMAGE]
    ids = [t for i in range(len(images)) for t in [*words[i * text :][:text], IMAGE]]
    ids += words[-text:]
    token_ids, pictures = place(ids, [(SIDE, SIDE, pixels(i, mark)) for i in images], RULES)
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=12, ignore_eos=True)
    return GenerateRequest(name, token_ids, sampling, pictures=pictures, **options)
