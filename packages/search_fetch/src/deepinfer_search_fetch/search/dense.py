"""Dense re-ranking of lexical candidates by any `embed(texts)`, with a gate against harm.

fused = (1 - w)·lexical / best lexical + w·minmax(cosine), w = WEIGHT. The weight falls to 0 where
the vectors do not know the query's language, or agree with the lexical order on nothing: a weak
embedding must not spoil a good ranking.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from deepinfer_search_fetch.analyzers import content_terms
from deepinfer_search_fetch.errors import ContentError, InvalidRequestError
from deepinfer_search_fetch.index.backend import Hit

Floats = NDArray[np.float32]
Embedder = Callable[[Sequence[str]], Floats]
"""Texts to float32 [n, d]; a row of zeros for a text it knows nothing of."""

WEIGHT = 0.3
DEPTH = 200
AGREEMENT_DEPTH = 20
MIN_AGREEMENT = 0.2
MIN_KNOWN = 0.5
_TEXT_CHARS = 4000


def rerank(query: str, hits: list[Hit], embed: Embedder) -> list[Hit]:
    """`hits` in fused order, scores replaced by fused ones on the lexical scale.

    Only the first DEPTH take part; a call of `embed` per search with at most DEPTH + 1 texts.
    """
    head, tail = hits[:DEPTH], hits[DEPTH:]
    if len(head) < 2:
        return hits
    texts = [f"{h.page.title} {h.page.content[:_TEXT_CHARS]}" for h in head]
    vectors = np.asarray(embed([query, *texts]), np.float32)
    if vectors.shape[0] != len(texts) + 1 or vectors.ndim != 2:
        raise ContentError(
            "feature_unavailable",
            f"embed returned shape {vectors.shape} for {len(texts) + 1} texts, wanted [n, d]",
        )
    length = np.linalg.norm(vectors, axis=1)
    if length[0] == 0:
        return hits
    cosine = vectors[1:] @ vectors[0] / np.maximum(length[1:] * length[0], 1e-12)
    lexical = np.array([h.score for h in head])
    if not _agrees(cosine):
        return hits
    spread = cosine.max() - cosine.min()
    scaled = (cosine - cosine.min()) / spread if spread > 0 else np.zeros_like(cosine)
    fused = ((1 - WEIGHT) * lexical / lexical.max() + WEIGHT * scaled) * lexical.max()
    order = np.argsort(-fused, kind="stable")
    floor = float(fused.min())
    # What was not looked at keeps its place behind, and its score must not say otherwise.
    rest = [h.scored(min(h.score, floor)) for h in tail]
    return [head[i].scored(float(fused[i])) for i in order] + rest


def _agrees(cosine: Floats) -> bool:
    """Whether enough of the lexical top AGREEMENT_DEPTH are in the dense one.

    By chance the share is AGREEMENT_DEPTH / number of candidates.
    """
    depth = min(AGREEMENT_DEPTH, max(1, len(cosine) // 2))
    dense_top = np.argsort(-cosine, kind="stable")[:depth]
    return float((dense_top < depth).mean()) >= max(MIN_AGREEMENT, 1.5 * depth / len(cosine))


class StaticTable:
    """Word vectors in a table: the text's vector is the weighted mean of its terms' vectors.

    words: index terms. vectors: float32 [words, d]. weights: float32 [words], e.g. idf.
    A text of which less than MIN_KNOWN of the terms are in the table gives zeros.
    """

    def __init__(self, words: Sequence[str], vectors: Floats, weights: Floats) -> None:
        if vectors.shape[0] != len(words) or weights.shape != (len(words),):
            raise InvalidRequestError(
                "invalid_argument",
                f"{len(words)} words, vectors {vectors.shape}, weights {weights.shape}",
            )
        self._row = {word: i for i, word in enumerate(words)}
        self._vectors = vectors.astype(np.float32)
        self._weights = weights.astype(np.float32)

    def __call__(self, texts: Sequence[str]) -> Floats:
        out = np.zeros((len(texts), self._vectors.shape[1]), np.float32)
        for i, text in enumerate(texts):
            found = content_terms(text)
            rows = [self._row[t] for t in found if t in self._row]
            if found and len(rows) >= MIN_KNOWN * len(found):
                out[i] = self._weights[rows] @ self._vectors[rows]
        return out

    def save(self, file: Path) -> None:
        """Write an .npz without pickled objects."""
        words = np.frombuffer(json.dumps(list(self._row)).encode(), np.uint8)
        with file.open("wb") as out:
            np.savez_compressed(out, words=words, vectors=self._vectors, weights=self._weights)

    @classmethod
    def load(cls, file: Path) -> StaticTable:
        """Read what `save` wrote. Raises InvalidRequestError for anything else."""
        try:
            with file.open("rb") as raw, np.load(raw, allow_pickle=False) as data:
                words = json.loads(data["words"].tobytes())
                return cls(words, data["vectors"], data["weights"])
        except (OSError, KeyError, ValueError, BadZipFile) as error:
            raise InvalidRequestError(
                "invalid_argument", f"{file} is not a table of vectors: {error}"
            ) from None

    @classmethod
    def learn(
        cls, texts: Sequence[str], *, dimensions: int = 128, min_documents: int = 2
    ) -> StaticTable:
        """Latent semantic analysis of the texts themselves (needs the `dense` extra).

        The truncated singular value decomposition of the log-tf·idf matrix (Deerwester et al.,
        1990): terms that keep the same company come to lie close.
        """
        sparse, linalg = _scipy()
        counted = [_counts(text) for text in texts]
        frequency: dict[str, int] = {}
        for counts in counted:
            for term in counts:
                frequency[term] = frequency.get(term, 0) + 1
        words = sorted(t for t, n in frequency.items() if n >= min_documents)
        if len(words) < 3 or len(texts) < 3:
            raise InvalidRequestError("invalid_argument", "too little text to learn vectors from")
        row = {t: i for i, t in enumerate(words)}
        idf = np.log(len(texts) / np.array([frequency[t] for t in words])).astype(np.float32)
        cells = [
            (row[t], j, (1 + np.log(n)) * idf[row[t]])
            for j, counts in enumerate(counted)
            for t, n in counts.items()
            if t in row
        ]
        rows, columns, values = zip(*cells, strict=True)
        shape = (len(words), len(texts))
        matrix = sparse.csr_matrix((values, (rows, columns)), shape=shape, dtype=np.float32)
        norms = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=0)).ravel())
        matrix = matrix @ sparse.diags(1.0 / np.maximum(norms, 1e-12)).astype(np.float32)
        k = max(1, min(dimensions, len(words) - 1, len(texts) - 1))
        start = np.random.default_rng(0).standard_normal(min(shape)).astype(np.float32)
        u, _, _ = linalg.svds(matrix, k=k, v0=start)
        return cls(words, np.ascontiguousarray(u, np.float32), idf)


def _counts(text: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for term in content_terms(text):
        counts[term] = counts.get(term, 0) + 1
    return counts


@lru_cache(maxsize=1)
def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import sparse
        from scipy.sparse import linalg
    except ImportError:
        raise ContentError(
            "feature_unavailable",
            "learning vectors needs scipy: pip install './packages/search_fetch[dense]'",
        ) from None
    return cast(Any, sparse), cast(Any, linalg)
