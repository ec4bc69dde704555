"""`TreeLoop`: draft a tree, verify it in one pass, keep the accepted path; for one request."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import Int
from deepinfer_dspark.drafting import DraftBatch
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.loop import TargetOutput, current_sampling
from deepinfer_dspark.sampling import SamplingBatch
from deepinfer_dspark.tree import TokenTree, verify_tree
from deepinfer_dspark.uniforms import CounterRng, Uniforms


class TreeDrafter(Protocol):
    """Proposes trees; owns its state by request."""

    def propose_tree(self, batch: DraftBatch, rng: Uniforms) -> TokenTree:
        """Drafts behind the anchor of the one request of the batch, no deeper than it has room."""
        ...

    def reset(self, request_id: Hashable) -> None:
        """Drop all state of a request."""
        ...


class TreeTarget(Protocol):
    """The model whose distribution is kept, for one request."""

    @property
    def vocab_size(self) -> int | None:
        """Ids it can be fed, or None for any."""
        ...

    @property
    def max_length(self) -> int | None:
        """Positions it has, or None."""
        ...

    def start(self, prompt: Sequence[int]) -> tuple[Any, Any | None]:
        """(state, features [n - 1, m*d] or None) after all tokens of the prompt but the last."""
        ...

    def forward(
        self, tokens: Int, positions: Int, visible: npt.NDArray[np.bool_], state: Any
    ) -> TargetOutput:
        """One pass over the anchor and the nodes. visible: bool [N + 1, N + 1], which of these
        rows each attends to, beside everything committed."""
        ...

    def keep(self, state: Any, rows: Int) -> None:
        """Of the last pass these rows stay, in this order."""
        ...


@dataclass(frozen=True, slots=True)
class TreeGeneration:
    """tokens: emitted ids; rounds: target passes; drafted, accepted: nodes."""

    tokens: list[int]
    rounds: int
    drafted: int
    accepted: int


class TreeLoop:
    """Generates for one request; the output keeps the target's distribution."""

    def __init__(
        self, drafter: TreeDrafter, target: TreeTarget, rng: Uniforms | None = None
    ) -> None:
        self._drafter, self._target = drafter, target
        self._rng: Uniforms = CounterRng() if rng is None else rng

    def generate(
        self, prompt: Sequence[int], sampling: SamplingBatch, max_new: int
    ) -> TreeGeneration:
        """Run until there are `max_new` tokens or a stop. Raises ShapeError for misuse.

        sampling: of one request; positions, max_new and the counts of penalties are kept up to
        date here.
        """
        if sampling.requests != 1 or max_new < 1 or not len(prompt):
            raise ShapeError(
                "TreeLoop.generate wants a prompt of at least one token, sampling for one request "
                f"and max_new >= 1, got {len(prompt)} tokens, {sampling.requests} and {max_new}"
            )
        limit = self._target.max_length
        if limit is not None and len(prompt) + max_new - 1 > limit:
            raise ShapeError(
                f"a prompt of {len(prompt)} tokens and max_new={max_new} need "
                f"{len(prompt) + max_new - 1} positions and the model has {limit}"
            )
        try:
            return self._run(list(prompt), sampling, max_new)
        finally:
            self._drafter.reset(0)

    def _run(self, text: list[int], sampling: SamplingBatch, max_new: int) -> TreeGeneration:
        start, one = len(text), np.zeros(1, dtype=np.int64)
        state, features = self._target.start(text)
        rounds, drafted, accepted, ended = 0, 0, 0, False
        while not ended:
            at = len(text) - 1
            now = current_sampling(sampling, one, [text], np.array([start]), max_new)
            room = max_new - (len(text) - start) - 1
            batch = DraftBatch(
                [0], np.array([text[-1]]), np.array([at]), [text], now, np.array([rounds]),
                features=features,
                feature_cu=None if features is None else np.array([0, int(features.shape[0])]),
                wanted=np.array([room]),
            )  # fmt: skip
            tree = self._drafter.propose_tree(batch, self._rng)
            depths = tree.depths()
            if int(depths.max()) > room:
                raise ShapeError(f"a tree of depth {int(depths.max())} came, wanted {room} at most")
            fed = np.concatenate([[text[-1]], tree.tokens])
            if self._target.vocab_size is not None:
                # never accepted, so the rows behind are never used
                fed = np.where((fed < 0) | (fed >= self._target.vocab_size), 0, fed)
            output = self._target.forward(fed, at + depths, tree.visible(), state)
            result = verify_tree(output.logits, tree, now, rng=self._rng)
            emitted, ended = _cut(result.tokens, now)
            rows = np.array([0, *(i + 1 for i in result.path)])[: max(len(emitted), 1)]
            self._target.keep(state, rows)
            features = None if output.features is None else output.features[rows]
            text += emitted
            rounds, drafted = rounds + 1, drafted + tree.tokens.size
            accepted += min(len(result.path), len(emitted))
            ended = ended or result.dead or len(text) - start >= max_new
        return TreeGeneration(text[start:], rounds, drafted, accepted)


def _cut(tokens: tuple[int, ...], sampling: SamplingBatch) -> tuple[list[int], bool]:
    """(tokens up to the first stop, whether there was one)."""
    ignore = sampling.ignore_eos is not None and bool(sampling.ignore_eos[0])
    stops = set() if ignore else set(sampling.eos_ids)
    if sampling.stop_ids is not None:
        stops |= set(sampling.stop_ids.ids.tolist())
    for k, token in enumerate(tokens):
        if token in stops:
            return list(tokens[: k + 1]), True
    return list(tokens), False
