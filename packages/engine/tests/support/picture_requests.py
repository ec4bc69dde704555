"""Requests with pictures of one size, for the tiny model that sees."""

from __future__ import annotations

import numpy as np

from deepinfer_engine.core.pictures import place
from deepinfer_engine.core.types import GenerateRequest, SamplingParams
from deepinfer_engine.model.runner import TorchRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=1)
SIZE = (252, 252)  # six by six cells: 44 tokens
PIXELS = 3 * SIZE[0] * SIZE[1]


def pixels(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, PIXELS, np.uint8).tobytes()


def request(model: TorchRunner, name: str, *images: int, text: int = 110) -> GenerateRequest:
    """The same text whatever the pictures; each after `text` words."""
    rules = model.caps.pictures
    assert rules is not None
    words = np.random.default_rng(5).integers(4, rules.image_token_id - 1, 4 * text).tolist()
    ids = [t for i in range(len(images)) for t in [*words[i * text :][:text], rules.image_token_id]]
    ids += words[-text:]
    token_ids, pictures = place(ids, [(*SIZE, pixels(i)) for i in images], rules)
    return GenerateRequest(name, token_ids, GREEDY, pictures=pictures)
