"""Engram: n-gram hash tables looked up by token ids and added to the residual streams through a
gate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from deepinfer_engine.adapters.kernels import Operators
from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.model.v41.config import TextConfig
from deepinfer_engine.model.v41.weights import EngramWeights

_ONE_SPACE = "\ue000"


def vocabulary_classes(tokenizer: Tokenizer) -> list[int]:
    """Compressed id of every token id: tokens that read the same after normalisation share one.

    NFKC, NFD, accents stripped, lower case, runs of white space joined, surrounding space stripped
    (a token that is only a space keeps it). Ids are numbered by first appearance.
    """
    normalise = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _ONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_ONE_SPACE, " "),
        ]
    )
    seen: dict[str, int] = {}
    classes: list[int] = []
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = (
            tokenizer.id_to_token(token_id) or ""
            if "\ufffd" in text
            else normalise.normalize_str(text) or text
        )
        classes.append(seen.setdefault(key, len(seen)))
    return classes


def _primes_after(value: int) -> Iterator[int]:
    candidate = value + 1
    while True:
        if candidate > 1 and all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            yield candidate
        candidate += 1


def table_primes(config: TextConfig) -> list[list[list[int]]]:
    """Table sizes [layer][n-gram size - 2][head]: consecutive unused primes from
    `engram_vocab_size` up."""
    used: set[int] = set()
    out: list[list[list[int]]] = []
    for _ in config.engram_layer_ids:
        sizes: list[list[int]] = []
        for _ in range(2, config.engram_max_ngram_size + 1):
            fresh = (p for p in _primes_after(config.engram_vocab_size - 1) if p not in used)
            heads = list(islice(fresh, config.engram_n_heads))
            used.update(heads)
            sizes.append(heads)
        out.append(sizes)
    return out


def multipliers(
    layer: int, compressed_vocab: int, max_ngram: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The odd int64 factors of one layer's hash, from its seeded generator."""
    bound = max(1, ((2**63 - 1) // compressed_vocab) // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return drawn * 2 + 1


class Engram:
    """Hashing and gating of all Engram layers of one model.

    Raises CheckpointError when the tokenizer or the table sizes are not those the tables were built
    with.
    """

    def __init__(self, config: TextConfig, tokenizer: Tokenizer, ops: Operators) -> None:
        self._ops = ops
        classes = vocabulary_classes(tokenizer)
        count = max(classes) + 1
        if count != config.engram_compressed_vocab_size:
            raise CheckpointError(
                f"tokenizer.json compresses to {count} token classes, the config says "
                f"engram_compressed_vocab_size {config.engram_compressed_vocab_size}: "
                "they do not belong together"
            )
        self._config = config
        self._pad = classes[config.engram_pad_token_id]
        # One more row than ids: index -1 (before the sequence) and ids beyond the tokenizer read as
        # padding.
        table = np.full(config.vocab_size + 1, -1, dtype=np.int64)
        known = min(len(classes), config.vocab_size)
        table[:known] = classes[:known]
        self._classes = torch.from_numpy(table)
        self._hashes: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for i, (layer, primes) in enumerate(
            zip(config.engram_layer_ids, table_primes(config), strict=True)
        ):
            flat = np.array(primes, dtype=np.int64)
            if int(flat.sum()) != config.engram_num_embeddings[i]:
                raise CheckpointError(
                    f"engram_num_embeddings of layer {layer} is "
                    f"{config.engram_num_embeddings[i]}, its table primes sum to {int(flat.sum())}"
                )
            offsets = (np.cumsum(flat) - flat.ravel()).reshape(flat.shape)
            factors = multipliers(layer, count, config.engram_max_ngram_size)
            self._hashes[layer] = (
                torch.from_numpy(factors),
                torch.from_numpy(flat),
                torch.from_numpy(offsets),
            )

    def compressed(self, grams: Tensor) -> Tensor:
        """Token ids [n, N] (-1: none) to compressed ids; from the first gap on, everything older is
        padding."""
        classes = self._classes[grams]
        broken = (classes < 0).cummax(dim=1).values
        return torch.where(broken, self._pad, classes)

    def rows(self, layer: int, compressed: Tensor) -> Tensor:
        """Table rows [n, (N-1) * heads] of compressed n-grams [n, N]."""
        return self._ops.engram_hash(compressed, *self._hashes[layer])

    def apply(
        self, weights: EngramWeights, rows: Tensor, streams: Tensor, blocked: Tensor | None
    ) -> Tensor:
        """Add the gated values to the streams [n, h, H]; `blocked`, bool [n]: rows without any."""
        n, h, H = streams.shape
        embedded = weights.table.take(rows).reshape(n, -1)
        projected = self._ops.linear(embedded, weights.wkv).view(n, h + 1, H)
        return self._ops.engram_gate(
            streams,
            projected[:, :h],
            projected[:, h],
            weights.q_weight,
            weights.k_weight,
            self._config.rms_norm_eps,
            blocked,
        )
