"""Token trees: several drafts for one position, verified in one pass.

Siblings are tried in order. Each is accepted with probability min(1, p(x)/q(x)), where q is the
distribution it was drawn from given its elder siblings; after a rejection p becomes the residual
norm(max(p - q, 0)) and the next sibling is tried against that. A rejected family ends in a draw
from what is left of p. This keeps the target's distribution for children drawn with or without
replacement, and for the most likely ones taken without drawing (point masses).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import Int, to_host
from deepinfer_dspark.backend import Backend, NumpyBackend, backend_of
from deepinfer_dspark.draft_law import SUM_TOLERANCE
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.sampling import Rows, SamplingBatch, edit_logits, scale_and_truncate
from deepinfer_dspark.uniforms import CounterRng, Uniforms

NODES_A_POSITION: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Drafts of one request behind its anchor.

    tokens:  int64 [N].
    parents: int64 [N]; the node each follows, -1 = the anchor; parents[i] < i. Siblings are tried
             in the order in which they stand here.
    q:       float32 or float64 [N, V] (numpy or torch), the distribution each token was drawn from
             given its elder siblings, or None: the tokens are a function of the text.
    """

    tokens: Int
    parents: Int
    q: Any | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "parents"):
            object.__setattr__(self, name, to_host(getattr(self, name)).astype(np.int64))
        N = self.tokens.size
        if self.tokens.shape != (N,) or self.parents.shape != (N,) or N >= NODES_A_POSITION:
            raise ShapeError(
                f"TokenTree wants tokens and parents [N], N < {NODES_A_POSITION}, got "
                f"{self.tokens.shape} and {self.parents.shape}"
            )
        if ((self.parents < -1) | (self.parents >= np.arange(N))).any():
            raise ShapeError("TokenTree wants -1 <= parents[i] < i")
        if self.q is not None and (len(self.q.shape) != 2 or int(self.q.shape[0]) != N):
            raise ShapeError(f"TokenTree wants q [{N}, V], got {tuple(self.q.shape)}")

    def depths(self) -> Int:
        """int64 [N + 1]; of the anchor (0), then of the nodes: add to the anchor's position."""
        depth = np.zeros(self.tokens.size + 1, dtype=np.int64)
        for i, parent in enumerate(self.parents.tolist()):
            depth[i + 1] = depth[parent + 1] + 1
        return depth

    def visible(self) -> npt.NDArray[np.bool_]:
        """bool [N + 1, N + 1]; which rows of the pass (anchor, then nodes) each row attends to."""
        mask = np.eye(self.tokens.size + 1, dtype=np.bool_)
        for i, parent in enumerate(self.parents.tolist()):
            mask[i + 1] |= mask[parent + 1]
        return mask


@dataclass(frozen=True, slots=True)
class TreeResult:
    """tokens: what is emitted, the accepted drafts and the final token; path: the accepted nodes,
    from the anchor on: rows 0 and path + 1 of the pass are those whose cache entries stay; dead:
    the last row allowed no token; then tokens ends with the accepted drafts."""

    tokens: tuple[int, ...]
    path: tuple[int, ...]
    dead: bool


def verify_tree(
    logits: Any,
    tree: TokenTree,
    sampling: SamplingBatch,
    masks: Any | None = None,
    rng: Uniforms | None = None,
) -> TreeResult:
    """Walk from the anchor along accepted drafts and emit one more token.

    logits: [N + 1, V] of any real dtype; row 0 follows the anchor, row i + 1 follows node i.
    sampling: parameters of this one request; max_new and stops are the caller's to apply.
    masks: bool [N + 1, V] or bit words, as `Verifier.verify` takes them.

    Raises ShapeError for arguments that do not fit.
    """
    N = tree.tokens.size
    if len(logits.shape) != 2 or int(logits.shape[0]) != N + 1 or sampling.requests != 1:
        raise ShapeError(
            f"verify_tree wants logits [{N + 1}, V] and sampling of one request, got "
            f"{tuple(logits.shape)} and {sampling.requests}"
        )
    walk = _Walk(backend_of(logits), logits, tree, sampling, masks, rng or CounterRng())
    return walk.run()


class _Walk:
    def __init__(
        self,
        xp: Backend,
        logits: Any,
        tree: TokenTree,
        sampling: SamplingBatch,
        masks: Any | None,
        rng: Uniforms,
    ) -> None:
        self.xp, self.tree, self.rng = xp, tree, rng
        self.vocab = int(logits.shape[1])
        depth = tree.depths()
        # each row is edited as a request of its own whose drafts are the row's ancestors
        before = np.zeros((depth.size, int(depth.max(initial=0))), dtype=np.int64)
        for i, parent in enumerate(tree.parents.tolist()):
            before[i + 1] = before[parent + 1]
            token = int(tree.tokens[i])
            before[i + 1, depth[i + 1] - 1] = token if 0 <= token < self.vocab else 0
        self.sampling = sampling.select(np.zeros(depth.size, dtype=np.int64))
        rows = Rows(np.arange(depth.size, dtype=np.int64), depth)
        self.logits = edit_logits(xp, logits, rows, before, self.sampling, masks)
        self.seed, self.position = sampling.seeds, int(sampling.positions[0])
        coupled = sampling.coupled is not None and bool(sampling.coupled[0])
        self.greedy = bool(sampling.temperature[0] == 0)
        self.coupled = coupled and not self.greedy
        self.children: dict[int, list[int]] = {}
        for i, parent in enumerate(tree.parents.tolist()):
            self.children.setdefault(parent, []).append(i)

    def run(self) -> TreeResult:
        path: list[int] = []
        node = -1
        while True:
            token, node = self._step(node, len(path))
            tokens = tuple(int(self.tree.tokens[i]) for i in path)
            if node < 0:
                return TreeResult(
                    (*tokens, token) if token >= 0 else tokens, tuple(path), token < 0
                )
            path.append(node)

    def _step(self, node: int, depth: int) -> tuple[int, int]:
        """(final token or -1, accepted child or -1) after a node."""
        row = np.array([node + 1])
        logits = self.xp.take(self.logits, row)
        position = np.array([self.position + depth])
        if not self.greedy:
            logits = scale_and_truncate(self.xp, logits, self.sampling, row)
            if self.coupled:
                logits = self.xp.add_gumbel(logits, self.seed, position)
        if self.greedy or self.coupled:
            choice, alive = self.xp.argmax(logits)
            token = int(choice[0]) if alive[0] else -1
            hit = [i for i in self.children.get(node, []) if self.tree.tokens[i] == token >= 0]
            return (token, hit[0]) if hit else (token, -1)
        if not np.isfinite(self.xp.normaliser(logits)[0]):
            return -1, -1
        p = to_host(self.xp.probabilities(logits))[0].astype(np.float64)
        tried = False
        for child in self.children.get(node, []):
            q = self._law(child)
            if q is None:
                continue
            tried, x = True, int(self.tree.tokens[child])
            # below every position of a chain, so that both kinds of rounds may alternate
            key = -1 - ((self.position + depth) * NODES_A_POSITION + child)
            u = float(self.rng("accept", self.seed, np.array([key]))[0])
            inside = x < self.vocab
            if inside and u < min(1.0, p[x] / q[x]):
                return x, child
            rest = np.maximum(p - q[: self.vocab], 0.0)
            mass = float(rest.sum())
            if mass > 0:
                p = rest / mass
        u = self.rng("residual" if tried else "bonus", self.seed, position)
        return int(NumpyBackend().draw(p[None], u)[0]), -1

    def _law(self, child: int) -> npt.NDArray[np.float64] | None:
        """q of a child over at least the target's vocabulary, or None where it cannot have been
        drawn from it: such a child is passed over."""
        x = int(self.tree.tokens[child])
        if self.tree.q is None:
            q = np.zeros(max(self.vocab, x + 1))
            if x >= 0:
                q[x] = 1.0
        else:
            q = to_host(self.tree.q[child]).astype(np.float64)
            if q.size < self.vocab:
                q = np.pad(q, (0, self.vocab - q.size))
        proper = abs(float(q.sum()) - 1.0) <= SUM_TOLERANCE and float(q.min()) >= 0.0
        return q if proper and 0 <= x < q.size and q[x] > 0 else None
