"""A one-layer attention model in float64 with a key-value cache, as target and as draft model."""

from __future__ import annotations

import numpy as np

from deepinfer_dspark.loop import TargetOutput


class ToyModel:
    def __init__(
        self, vocab: int = 12, width: int = 8, seed: int = 0, sharpness: float = 3.0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.vocab, self.width = vocab, width
        self.embed = rng.normal(size=(vocab, width))
        self.wk, self.wv, self.wq = (rng.normal(size=(width, width)) for _ in range(3))
        self.head = rng.normal(size=(width, vocab)) * sharpness / width

    def entries(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        x = self.embed[tokens] + 0.3 * np.sin(positions[:, None] * (1 + np.arange(self.width)))
        # one row at a time: a product over all rows may round differently with their number
        k, v = ((x[:, :, None] * w).sum(axis=1) for w in (self.wk, self.wv))
        return np.concatenate([k, v, x], axis=1)

    def rows(self, cache: np.ndarray, count: int) -> np.ndarray:
        """Logits of the last `count` entries, each attending to itself and what is before it."""
        d, out = self.width, []
        for i in range(cache.shape[0] - count, cache.shape[0]):
            keys, values, x = cache[: i + 1, :d], cache[: i + 1, d : 2 * d], cache[i, 2 * d :]
            score = keys @ (x @ self.wq) / np.sqrt(d)
            weight = np.exp(score - score.max())
            out.append((np.tanh(x + (weight / weight.sum()) @ values)) @ self.head)
        return np.array(out)


class ToyTarget:
    """`Target` over `ToyModel`; `roll_back=False` is a deliberate bug for the mutation tests."""

    def __init__(self, model: ToyModel, *, roll_back: bool = True) -> None:
        self.model, self.roll_back = model, roll_back
        self.vocab_size, self.max_length = model.vocab, None

    def start(self, prompts):
        state = [
            self.model.entries(np.array(p[:-1], dtype=np.int64), np.arange(len(p) - 1))
            for p in prompts
        ]
        return state, np.concatenate(state)

    def forward(self, tokens, cu_lens, positions, state):
        logits, features = [], []
        for r in range(len(state)):
            part = slice(cu_lens[r], cu_lens[r + 1])
            new = self.model.entries(tokens[part], positions[part])
            state[r] = np.concatenate([state[r], new])
            logits.append(self.model.rows(state[r], new.shape[0]))
            features.append(new)
        self.last = np.diff(cu_lens)
        return TargetOutput(np.concatenate(logits), np.concatenate(features))

    def commit(self, state, keep):
        for r in range(len(state)):
            drop = int(self.last[r] - keep[r])
            if drop and self.roll_back:
                state[r] = state[r][:-drop]

    def select(self, state, requests):
        return [state[r] for r in requests.tolist()]


class ToyCausal:
    """`CausalModel` over `ToyModel`, without a cache. passes: [rows of each call]."""

    def __init__(self, model: ToyModel, max_length: int | None = None) -> None:
        self.model, self.max_length = model, max_length
        self.passes: list[int] = []

    def logits(self, request_ids, texts):
        assert self.max_length is None or max(map(len, texts)) <= self.max_length
        self.passes.append(len(texts))
        rows = []
        for text in texts:
            cache = self.model.entries(np.array(text, dtype=np.int64), np.arange(len(text)))
            rows.append(self.model.rows(cache, 1)[0])
        return np.array(rows)

    def forget(self, request_id) -> None:
        pass


def plain(model: ToyModel, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without any of the package."""
    text = list(prompt)
    for _ in range(count):
        cache = model.entries(np.array(text), np.arange(len(text)))
        text.append(int(model.rows(cache, 1)[0].argmax()))
    return text[len(prompt) :]
