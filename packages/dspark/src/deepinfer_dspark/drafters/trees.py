"""Token trees out of drafters: the most likely branches, or branches that were drawn.

A tree of the most likely branches is a function of the text, so its tokens are point masses and
nodes may be chosen by how likely they are. Drawn children carry the distribution each was drawn
from given its elder siblings; then only *whether a node gets children* may follow from what was
drawn before them: leaving out a drawn node by its own token would change the output.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import to_host
from deepinfer_dspark.backend import backend_of
from deepinfer_dspark.drafters.mixed import CausalModel
from deepinfer_dspark.drafting import DraftBatch
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.sampling import scale_and_truncate
from deepinfer_dspark.tree import TokenTree
from deepinfer_dspark.uniforms import Uniforms, draft_key

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """depth: levels of drafts; branches: nodes that get children at each level, and children of
    each; nodes: most drafts of a tree."""

    depth: int = 4
    branches: int = 3
    nodes: int = 16

    def __post_init__(self) -> None:
        if min(self.depth, self.branches, self.nodes) < 1:
            raise ShapeError(
                f"TreeShape wants depth, branches and nodes >= 1, got {self.depth}, "
                f"{self.branches} and {self.nodes}"
            )


@dataclass(slots=True)
class Branches:
    """A tree while it grows, in the order in which nodes were added."""

    tokens: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    alive: list[float] = field(default_factory=list[float])  # product of probabilities on the way
    laws: list[Float] = field(default_factory=list[Float])

    def add(self, parent: int, token: int, share: float, law: Float | None = None) -> int:
        """A child of `parent` (-1 = the anchor), which its parent's distribution gives `share`."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.alive.append(share * (1.0 if parent < 0 else self.alive[parent]))
        if law is not None:
            self.laws.append(law)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Nodes from the anchor's child down to `node`."""
        out: list[int] = []
        while node >= 0:
            out.append(node)
            node = self.parents[node]
        return out[::-1]

    def best(self, among: Sequence[int], count: int) -> list[int]:
        """The likeliest nodes, earlier ones on ties."""
        return sorted(among, key=lambda i: (-self.alive[i], i))[:count]

    def tree(self, most: int) -> TokenTree:
        """The `most` likeliest nodes; no node is likelier than its parent, so parents stay."""
        kept = sorted(self.best(range(len(self.tokens)), most))
        index = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return TokenTree(
            np.array([self.tokens[i] for i in kept], dtype=np.int64),
            np.array([index[self.parents[i]] for i in kept], dtype=np.int64),
        )


Expand = Callable[[Branches, list[int]], Float]
"""Distributions [n, V] after each of n nodes of a tree."""


def most_likely(shape: TreeShape, depth: int, first: Float, expand: Expand) -> TokenTree:
    """The likeliest branches. first: [V], after the anchor; depth: levels, at most the shape's."""
    grown = Branches()

    def children(parent: int, law: Float) -> list[int]:
        order = np.argsort(-law, kind="stable")[: shape.branches]
        return [grown.add(parent, t, float(law[t])) for t in order.tolist() if law[t] > 0]

    level = children(-1, first) if depth > 0 else []
    for _ in range(depth - 1):
        chosen = grown.best(level, shape.branches)
        if not chosen:
            break
        laws = expand(grown, chosen)
        level = [c for i, law in zip(chosen, laws, strict=True) for c in children(i, law)]
    return grown.tree(shape.nodes)


def drawn(
    shape: TreeShape, depth: int, first: Float, expand: Expand, draw: Callable[[Float, int], int]
) -> TokenTree:
    """Branches drawn without replacement. draw(law, node): one token of law [V]."""
    grown = Branches()

    def children(parent: int, law: Float) -> list[int]:
        out: list[int] = []
        left = law
        while len(out) < shape.branches and left.any():
            own = left / left.sum()
            token = draw(own, len(grown.tokens))
            out.append(grown.add(parent, token, float(law[token]), own))
            left = np.where(np.arange(law.size) == token, 0.0, left)
        return out

    level = children(-1, first) if depth > 0 else []
    for _ in range(depth - 1):
        room = (shape.nodes - len(grown.tokens)) // shape.branches
        chosen = grown.best(level, min(shape.branches, room))
        if not chosen:
            break
        laws = expand(grown, chosen)
        level = [c for i, law in zip(chosen, laws, strict=True) for c in children(i, law)]
    return TokenTree(
        np.array(grown.tokens, dtype=np.int64),
        np.array(grown.parents, dtype=np.int64),
        np.array(grown.laws) if grown.laws else None,
    )


class DraftModelTree:
    """Trees of any causal model that shares the target's tokenizer, one pass a level.

    drawn: draw the branches of sampled requests without replacement; else, and for greedy
    requests, take the most likely ones.

    Raises ShapeError for arguments that do not fit.
    """

    def __init__(
        self, model: CausalModel, shape: TreeShape | None = None, *, drawn: bool = False
    ) -> None:
        self.shape = TreeShape() if shape is None else shape
        if drawn and self.shape.nodes < self.shape.branches:
            raise ShapeError(
                f"a drawn family stays whole: want nodes >= branches, got {self.shape.nodes} and "
                f"{self.shape.branches}"
            )
        self._model, self._drawn = model, drawn

    def propose_tree(self, batch: DraftBatch, rng: Uniforms) -> TokenTree:
        """See `TreeDrafter.propose_tree`."""
        text, request = list(batch.history[0]), batch.request_ids[0]
        depth = int(batch.room(self.shape.depth)[0])
        if self._model.max_length is not None:
            depth = max(min(depth, self._model.max_length + 1 - len(text)), 0)
        if depth == 0:
            return TokenTree(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        sampled = self._drawn and float(batch.sampling.temperature[0]) > 0

        def expand(grown: Branches, nodes: list[int]) -> Float:
            texts = [[*text, *(grown.tokens[i] for i in grown.path(node))] for node in nodes]
            # a cache for each branch of a level, whatever node it is in this round
            return self._laws([(request, i) for i in range(len(nodes))], texts, batch, sampled)

        first = self._laws([(request, 0)], [text], batch, sampled)[0]
        if not sampled:
            return most_likely(self.shape, depth, first, expand)

        def draw(law: Float, node: int) -> int:
            u = rng("draft", batch.sampling.seeds, draft_key(batch.rounds, node))
            return int(backend_of(law).draw(law[None], u)[0])

        return drawn(self.shape, depth, first, expand, draw)

    def _laws(
        self, ids: list[Any], texts: list[list[int]], batch: DraftBatch, sampled: bool
    ) -> Float:
        logits = self._model.logits(ids, texts)
        xp = backend_of(logits)
        if sampled:
            rows = np.zeros(len(texts), dtype=np.int64)
            logits = scale_and_truncate(xp, logits, batch.sampling, rows)
        return to_host(xp.probabilities(xp.widen(logits))).astype(np.float64)

    def reset(self, request_id: Hashable) -> None:
        """Drop the model's caches of a request."""
        for branch in range(self.shape.branches):
            self._model.forget((request_id, branch))
