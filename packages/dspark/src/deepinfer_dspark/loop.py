"""`SpecLoop`: draft, budget, verify, commit; the loop an engine runs, small enough to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.budget import BudgetScheduler, ConfidenceHistory
from deepinfer_dspark.drafting import DraftBatch, Drafter
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.proposal import Proposal
from deepinfer_dspark.ragged import RaggedIds
from deepinfer_dspark.sampling import SamplingBatch
from deepinfer_dspark.uniforms import CounterRng, Uniforms
from deepinfer_dspark.verification import Verifier, VerifyResult

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """logits: [B, V]; features: [B, m*d] hidden states for the drafter, or None."""

    logits: Any
    features: Any | None = None


class Target(Protocol):
    """The model whose distribution is kept. Its state holds what was committed, by request."""

    @property
    def vocab_size(self) -> int | None:
        """Ids it can be fed, or None for any; drafts beyond are never accepted."""
        ...

    @property
    def max_length(self) -> int | None:
        """Positions it has, or None."""
        ...

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any | None]:
        """(state, features) after all tokens of each prompt but the last, the first anchor.

        features: [sum(len(prompt) - 1), m*d] hidden states for the drafter, or None.
        """
        ...

    def forward(self, tokens: Int, cu_lens: Int, positions: Int, state: Any) -> TargetOutput:
        """One pass over anchors and drafts, flat [B]; row i predicts the token after tokens[i]."""
        ...

    def commit(self, state: Any, keep: Int) -> None:
        """Keep the first keep[r] rows of the last forward of request r, drop the rest."""
        ...

    def select(self, state: Any, requests: Int) -> Any:
        """State of the given requests (others have ended)."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """tokens: emitted ids of each request; rounds: target passes; verified, accepted: drafts;
    rows: tokens that went through the target; results: one VerifyResult a round."""

    tokens: list[list[int]]
    rounds: int
    verified: int
    accepted: int
    rows: int
    results: list[VerifyResult]

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens a request gains in a target pass."""
        passes = sum(r.verified.size for r in self.results)
        return sum(len(t) for t in self.tokens) / max(passes, 1)


class SpecLoop:
    """Generates for a batch of requests until each has ended.

    scheduler None verifies every draft. Budgets are computed from the round before the drafts they
    are for, as an engine that schedules ahead must.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        target: Target,
        scheduler: BudgetScheduler | None = None,
        verifier: Verifier | None = None,
        rng: Uniforms | None = None,
    ) -> None:
        self._drafter, self._target, self._scheduler = drafter, target, scheduler
        self._verifier = Verifier() if verifier is None else verifier
        self._rng: Uniforms = CounterRng() if rng is None else rng
        self._gamma = 0 if drafter is None else drafter.max_tokens

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingBatch,
        max_new: int,
        *,
        logprobs: int | None = None,
    ) -> Generation:
        """Run until every request has `max_new` tokens or a stop. Raises ShapeError for misuse.

        prompts: R sequences of at least one token; sampling: parameters of R requests (positions,
        max_new and the counts of penalties are kept up to date here).
        """
        R = len(prompts)
        if sampling.requests != R or max_new < 1 or not all(len(p) for p in prompts):
            raise ShapeError(
                f"generate wants prompts of at least one token, sampling for {R} requests and "
                f"max_new >= 1, got prompt lengths {[len(p) for p in prompts][:8]}, "
                f"{sampling.requests} and {max_new}"
            )
        longest, limit = max((len(p) for p in prompts), default=0), self._target.max_length
        if limit is not None and longest + max_new - 1 > limit:
            raise ShapeError(
                f"a prompt of {longest} tokens and max_new={max_new} need {longest + max_new - 1} "
                f"positions and the model has {limit}: ask for less or shorten the prompt"
            )
        if R == 0:
            return Generation([], 0, 0, 0, 0, [])
        history = [list(p) for p in prompts]
        try:
            return self._run(history, sampling, max_new, logprobs)
        finally:
            # whatever happened, the next batch starts with drafters that know nothing of this one
            if self._drafter is not None:
                for r in range(R):
                    self._drafter.reset(r)

    def _run(
        self,
        history: list[list[int]],
        sampling: SamplingBatch,
        max_new: int,
        logprobs: int | None,
    ) -> Generation:
        R = len(history)
        starts = np.array([len(p) for p in history], dtype=np.int64)
        active = np.arange(R, dtype=np.int64)
        state, first = self._target.start(history)
        memory = ConfidenceHistory(R, self._gamma)
        rounds = np.zeros(R, dtype=np.int64)
        features: tuple[Any, Int] | None = None
        if first is not None:
            features = first, np.concatenate([[0], np.cumsum(starts - 1)]).astype(np.int64)
        results: list[VerifyResult] = []
        while active.size:
            now = current_sampling(sampling, active, history, starts, max_new)
            proposal = self._propose(active, history, now, rounds, features)
            lens = self._lengths(proposal, active, memory, now)
            tokens, cu, positions = _flatten(
                history, active, proposal, lens, self._target.vocab_size
            )
            output = self._target.forward(tokens, cu, positions, state)
            result = self._verifier.verify(
                output.logits, cu, proposal, lens, now, rng=self._rng, logprobs=logprobs
            )
            self._target.commit(state, result.keep)
            features = _kept_features(output.features, cu, result.keep)
            if self._drafter is not None:
                self._drafter.observe(active.tolist(), result)
            for i, r in enumerate(active.tolist()):
                history[r] += result.emitted(i)
            rounds[active] += 1
            results.append(result)
            running = np.flatnonzero(~(result.stopped | result.exhausted | result.dead))
            if running.size < active.size:
                ended = np.setdiff1d(active, active[running])
                memory.stop(ended)
                if self._drafter is not None:
                    for r in ended.tolist():
                        self._drafter.reset(r)
                features = _select_features(features, running)
                state = self._target.select(state, running)
                active = active[running]
        return Generation(
            tokens=[h[s:] for h, s in zip(history, starts.tolist(), strict=True)],
            rounds=len(results),
            verified=int(sum(r.verified.sum() for r in results)),
            accepted=int(sum(r.n_accepted.sum() for r in results)),
            rows=int(sum((r.verified + 1).sum() for r in results)),
            results=results,
        )

    def _propose(
        self,
        active: Int,
        history: list[list[int]],
        sampling: SamplingBatch,
        rounds: Int,
        features: tuple[Any, Int] | None,
    ) -> Proposal:
        if self._drafter is None:
            return Proposal.empty(active.size)
        own = [history[r] for r in active.tolist()]
        # the last token of an answer is the target's own, and no draft may stand beyond the context
        wanted = np.full(active.size, self._gamma, dtype=np.int64)
        if sampling.max_new is not None:
            wanted = np.minimum(wanted, sampling.max_new - 1)
        if self._target.max_length is not None:
            wanted = np.minimum(wanted, self._target.max_length - sampling.positions)
        wanted = np.maximum(wanted, 0)
        batch = DraftBatch(
            request_ids=active.tolist(),
            anchors=np.array([h[-1] for h in own], dtype=np.int64),
            positions=np.array([len(h) - 1 for h in own], dtype=np.int64),
            history=own,
            sampling=sampling,
            rounds=rounds[active],
            features=None if features is None else features[0],
            feature_cu=None if features is None else features[1],
            wanted=wanted,
        )
        proposal = self._drafter.propose(batch, self._rng)
        if (proposal.lengths <= wanted).all():
            return proposal
        return replace(proposal, lengths=np.minimum(proposal.lengths, wanted))

    def _lengths(
        self, proposal: Proposal, active: Int, memory: ConfidenceHistory, now: SamplingBatch
    ) -> Int:
        lengths = proposal.lengths.astype(np.int64)
        if self._scheduler is None or proposal.conf is None:
            return lengths
        memory.record(active, proposal.conf)
        certain = proposal.deterministic or bool((now.temperature == 0).all())
        exact = self._scheduler.mode == "exact"
        seen = proposal.conf if exact else memory.older(active, 0, lengths > 0)
        budget = self._scheduler.budget(seen, lengths, deterministic=certain)
        return self._scheduler.allocate(budget, proposal.conf, lengths)


def current_sampling(
    sampling: SamplingBatch,
    active: Int,
    history: list[list[int]],
    starts: Int,
    max_new: int,
) -> SamplingBatch:
    """Parameters of the active requests for their next round.

    history: texts of all requests; starts: where their answers begin; max_new: tokens an answer
    may have. Penalties count the answer so far.
    """
    positions = np.array([len(history[r]) for r in active.tolist()], dtype=np.int64)
    left = max_new - (positions - starts[active])
    now = replace(sampling.select(active), positions=positions, max_new=left)
    if now.penalties is None:
        return now
    seen = [np.unique(history[r][starts[r] :], return_counts=True) for r in active.tolist()]
    output = RaggedIds.of(
        [ids.astype(np.int64).tolist() for ids, _ in seen], [n.tolist() for _, n in seen]
    )
    return replace(now, penalties=replace(now.penalties, output=output))


def _flatten(
    history: list[list[int]], active: Int, proposal: Proposal, lens: Int, vocab: int | None
) -> tuple[Int, Int, Int]:
    """(tokens, cu_lens, positions) of the verify batch: anchor, then the verified drafts.

    A draft the target has no embedding for is fed as token 0: it is never accepted, so the rows
    behind it are never used. Leaving it out instead would change the distribution.
    """
    cu = np.zeros(active.size + 1, dtype=np.int64)
    np.cumsum(lens + 1, out=cu[1:])
    anchors = np.array([history[r][-1] for r in active.tolist()], dtype=np.int64)
    at = np.array([len(history[r]) - 1 for r in active.tolist()], dtype=np.int64)
    block = np.concatenate([anchors[:, None], proposal.tokens], axis=1).astype(np.int64)
    k = np.arange(block.shape[1])[None, :]
    inside = k <= lens[:, None]
    if vocab is not None:
        block[(block < 0) | (block >= vocab)] = 0
    return block[inside], cu, (at[:, None] + k)[inside]


def _kept_features(features: Any | None, cu: Int, keep: Int) -> tuple[Any, Int] | None:
    if features is None:
        return None
    kept = np.zeros(keep.size + 1, dtype=np.int64)
    np.cumsum(keep, out=kept[1:])
    rows = np.repeat(cu[:-1] - kept[:-1], keep) + np.arange(kept[-1])
    return features[rows], kept


def _select_features(features: tuple[Any, Int] | None, requests: Int) -> tuple[Any, Int] | None:
    if features is None:
        return None
    values, cu = features
    count = np.diff(cu)[requests]
    kept = np.zeros(requests.size + 1, dtype=np.int64)
    np.cumsum(count, out=kept[1:])
    rows = np.repeat(cu[requests] - kept[:-1], count) + np.arange(kept[-1])
    return values[rows], kept
