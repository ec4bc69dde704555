"""Lossless verification of drafts, vectorised over requests.

Rejection rule (Leviathan et al. 2023; Chen et al. 2023): accept draft x with probability
min(1, p(x)/q(x)); at the first rejection emit from norm(max(p - q, 0)); after the last accepted
draft emit from the next row. The residual is exact: where rounding leaves it empty, p itself is
used, which only happens when a rejection has probability 0. Logits may come in any dtype; what is
computed from them is computed in float32 or better.

Temperature 0 accepts while the draft is the argmax. Coupled requests accept while the draft is
the argmax of log p + g(seed, position, id) and always emit that argmax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import Float, Int, to_host
from deepinfer_dspark.backend import Backend, backend_of
from deepinfer_dspark.draft_law import DraftLaw
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.proposal import Proposal
from deepinfer_dspark.sampling import Rows, SamplingBatch, edit_logits, scale_and_truncate
from deepinfer_dspark.uniforms import CounterRng, Purpose, Uniforms


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Outcome of one verification round.

    tokens:      int64 [N] with cu_tokens int64 [R+1]: request r emits, in order,
                 tokens[cu_tokens[r]:cu_tokens[r+1]] = its accepted drafts, then the final token.
    n_accepted:  int64 [R]; accepted drafts that are kept (a stop token or max_new cuts the run).
    final:       int64 [R]; the token drawn by the target, -1 where the run was cut before it or
                 the request is dead.
    accept_prob: float64 [R, gamma]; chance that draft k was accepted given its prefix, NaN where
                 it was not judged (not verified, behind a rejection, or behind a stop).
    stopped:     bool [R]; the last emitted token is a stop or eos id.
    exhausted:   bool [R]; max_new was reached.
    dead:        bool [R]; the row that had to produce the next token has no allowed token or is
                 not finite. Accepted drafts before it are kept; the request cannot go on.
    invalid:     bool [R]; a draft cannot have been drawn from its q (no probability there, or q is
                 no distribution). It and those behind it were not judged; its position was drawn
                 from the target, so the text is as good as any. The drafter needs a look.
    verified:    int64 [R]; drafts that were in the batch.
    logprobs:    float64 [N] or None; of the *unmodified* logits, one for each emitted token.
    top_ids, top_logprobs: [N, n] or None; the n largest of the same rows.
    """

    tokens: Int
    cu_tokens: Int
    n_accepted: Int
    final: Int
    accept_prob: Float
    stopped: npt.NDArray[np.bool_]
    exhausted: npt.NDArray[np.bool_]
    dead: npt.NDArray[np.bool_]
    invalid: npt.NDArray[np.bool_]
    verified: Int
    logprobs: Float | None = None
    top_ids: Int | None = None
    top_logprobs: Float | None = None

    @property
    def keep(self) -> Int:
        """int64 [R]; rows of the verify batch whose cache entries stay: anchor + kept drafts."""
        return self.n_accepted + 1

    @property
    def judged(self) -> Int:
        """int64 [R]; positions whose accept-or-reject outcome is known and may be counted."""
        return np.asarray(np.isfinite(self.accept_prob).sum(axis=1), dtype=np.int64)

    def select(self, requests: Int) -> VerifyResult:
        """The outcome of some of the requests, in the given order."""
        count = np.diff(self.cu_tokens)[requests]
        cu = np.zeros(requests.size + 1, dtype=np.int64)
        np.cumsum(count, out=cu[1:])
        at = np.repeat(self.cu_tokens[requests] - cu[:-1], count) + np.arange(cu[-1])

        def flat(values: Any) -> Any:
            return None if values is None else values[at]

        return VerifyResult(
            tokens=self.tokens[at],
            cu_tokens=cu,
            n_accepted=self.n_accepted[requests],
            final=self.final[requests],
            accept_prob=self.accept_prob[requests],
            stopped=self.stopped[requests],
            exhausted=self.exhausted[requests],
            dead=self.dead[requests],
            invalid=self.invalid[requests],
            verified=self.verified[requests],
            logprobs=flat(self.logprobs),
            top_ids=flat(self.top_ids),
            top_logprobs=flat(self.top_logprobs),
        )

    def emitted(self, request: int) -> list[int]:
        """Tokens of one request, in order."""
        return self.tokens[self.cu_tokens[request] : self.cu_tokens[request + 1]].tolist()


class Verifier:
    """Judges drafts against target logits. Stateless: one instance serves any number of batches."""

    def verify(
        self,
        logits: Any,
        cu_lens: Any,
        proposal: Proposal,
        lens: Any,
        sampling: SamplingBatch,
        masks: Any | None = None,
        rng: Uniforms | None = None,
        *,
        raw_logits: Any | None = None,
        logprobs: int | None = None,
    ) -> VerifyResult:
        """Accept drafts and emit one more token a request.

        logits:   [B, V] of any real dtype, numpy or torch; row cu_lens[r] + j of request r predicts
                  the token after its anchor and first j drafts. B = sum(1 + lens).
        cu_lens:  int [R+1]; cu_lens[r+1] - cu_lens[r] == 1 + lens[r].
        proposal: the drafts; only the first lens[r] of each request are looked at.
        lens:     int [R]; drafts verified, 0..proposal.lengths[r]. Whoever chose lens must not
                  have looked at draft k or later to decide on draft k (see `BudgetScheduler`).
        sampling: parameters; see `SamplingBatch`.
        masks:    bool [B, V], True = allowed, or int32 [B, ceil(V/32)] bit words. Rows behind a
                  draft that the mask forbids are never used and may hold anything.
        rng:      source of uniforms, default `CounterRng()`.
        raw_logits: what logprobs are taken from when `logits` were already edited by the caller.
        logprobs: None = none, 0 = of the emitted tokens, n = also of the n most likely tokens.

        Raises ShapeError for arrays that do not fit together.
        """
        xp = backend_of(logits)
        cu, lens64 = _check(logits, cu_lens, proposal, lens, sampling)
        if logprobs is not None and (logprobs < 0 or int(logprobs) != logprobs):
            raise ShapeError(f"logprobs wants None or an integer of at least 0, got {logprobs}")
        if raw_logits is not None and tuple(raw_logits.shape) != tuple(logits.shape):
            raise ShapeError(
                f"raw_logits wants the shape of logits {tuple(logits.shape)}, got "
                f"{tuple(raw_logits.shape)}"
            )
        rng = CounterRng() if rng is None else rng
        rows = Rows.of(lens64)
        vocab = int(logits.shape[1])
        raw = logits if raw_logits is None else raw_logits
        if not lens64.any():
            result = self._sampled(xp, logits, rows, proposal, sampling, masks, rng)
            return result if logprobs is None else _with_logprobs(xp, raw, cu, result, logprobs)
        # entries beyond lens may be padding of any value; ids the target does not have are never
        # accepted, so the rows behind them are never used
        k = np.arange(proposal.gamma, dtype=np.int64)[None, :]
        in_use = k < lens64[:, None]
        drafts = np.where(in_use, to_host(proposal.tokens).astype(np.int64, copy=False), 0)
        countable = np.where((drafts >= 0) & (drafts < vocab), drafts, 0)
        edited = edit_logits(xp, logits, rows, countable, sampling, masks)

        drawn = (sampling.temperature > 0) & ~_coupled(sampling)
        q = DraftLaw(proposal, drafts, vocab)
        unsound = q.unsound(in_use & drawn[:, None])
        sound = np.minimum(lens64, np.where(unsound, k, lens64[:, None]).min(1, initial=k.size))
        judge = _Judge(xp, edited, rows, cu, sound, drafts, q, sampling, rng)
        accept_prob, accepted = judge.accept()
        run = np.logical_and.accumulate(accepted, axis=1).sum(axis=1, dtype=np.int64)
        final, dead = judge.final(run)
        result = _cut(run, final, dead, drafts, accept_prob, lens64, sound, sampling)
        return result if logprobs is None else _with_logprobs(xp, raw, cu, result, logprobs)

    def _sampled(
        self,
        xp: Backend,
        logits: Any,
        rows: Rows,
        proposal: Proposal,
        sampling: SamplingBatch,
        masks: Any | None,
        rng: Uniforms,
    ) -> VerifyResult:
        """A round without drafts, the step of most requests most of the time: nothing is judged, so
        what judging needs is not made. The outcome is that of the general way."""
        R, none = proposal.requests, np.zeros(proposal.requests, dtype=np.int64)
        drafts = np.zeros((R, 0), dtype=np.int64)
        edited = edit_logits(xp, logits, rows, drafts, sampling, masks)
        judge = _Judge(xp, edited, rows, np.arange(R + 1), none, drafts, None, sampling, rng)
        final, dead = judge.final(none)
        alive = ~dead
        cu = np.zeros(R + 1, dtype=np.int64)
        np.cumsum(alive, out=cu[1:])
        exhausted = np.zeros(R, dtype=np.bool_)
        if sampling.max_new is not None:
            exhausted = alive >= sampling.max_new
        return VerifyResult(
            tokens=final[alive],
            cu_tokens=cu,
            n_accepted=none,
            final=final,
            accept_prob=np.full((R, proposal.gamma), np.nan),
            stopped=_stop_hits(final[:, None], sampling)[:, 0] & alive,
            exhausted=exhausted,
            dead=dead,
            invalid=np.zeros(R, dtype=np.bool_),
            verified=none,
        )


def _check(
    logits: Any, cu_lens: Any, proposal: Proposal, lens: Any, sampling: SamplingBatch
) -> tuple[Int, Int]:
    cu = to_host(cu_lens).astype(np.int64, copy=False)
    lens64 = to_host(lens).astype(np.int64, copy=False)
    R = proposal.requests
    if lens64.shape != (R,) or cu.shape != (R + 1,) or sampling.requests != R:
        raise ShapeError(
            f"verify got a proposal of {R} requests, lens {lens64.shape}, cu_lens {cu.shape}, "
            f"sampling for {sampling.requests}: they must agree"
        )
    fits = len(logits.shape) == 2 and cu[0] == 0 and bool((cu[1:] - cu[:-1] == lens64 + 1).all())
    if not fits:
        raise ShapeError(
            "verify wants 2-d logits and cu_lens = concat([0], cumsum(1 + lens)), got logits "
            f"{tuple(logits.shape)} and cu_lens {cu[:4].tolist()}..."
        )
    if int(logits.shape[0]) != int(cu[-1]):
        raise ShapeError(f"verify wants {int(cu[-1])} rows of logits, got {int(logits.shape[0])}")
    if not ((lens64 >= 0) & (lens64 <= proposal.lengths)).all():
        raise ShapeError("verify wants lens[r] between 0 and the drafts the proposal has for r")
    return cu, lens64


def _coupled(sampling: SamplingBatch) -> npt.NDArray[np.bool_]:
    """bool [R]; which requests share their noise with the drafter (greedy ones have none)."""
    warm = np.asarray(sampling.temperature > 0)
    return np.zeros_like(warm) if sampling.coupled is None else sampling.coupled & warm


class _Judge:
    """The three rules (argmax, rejection, coupled) behind two questions: accepted? final token?

    lens: int64 [R]; drafts that are judged, of which the first of the rest may be unsound.
    q: may be None where there are none.
    """

    def __init__(
        self,
        xp: Backend,
        logits: Any,
        rows: Rows,
        cu: Int,
        lens: Int,
        drafts: Int,
        q: DraftLaw | None,
        sampling: SamplingBatch,
        rng: Uniforms,
    ) -> None:
        self.xp, self.rows, self.cu, self.lens = xp, rows, cu, lens
        self.drafts, self.q, self.sampling, self.rng = drafts, q, sampling, rng
        self.vocab = int(logits.shape[1])
        greedy = np.asarray(sampling.temperature == 0)
        coupled = _coupled(sampling)
        self.drawn = ~(greedy | coupled)  # [R] requests that follow the rejection rule
        B = rows.request.size
        self.choice = np.zeros(B, dtype=np.int64)  # what argmax and coupled rows emit
        self.alive = np.ones(B, dtype=np.bool_)
        self.log_mass = np.zeros(B)
        if not self.drawn.any() and not coupled.any():
            self.choice, self.alive = xp.argmax(logits)
            return
        by_request = rows.request
        at = np.flatnonzero(greedy[by_request])
        if at.size:
            self.choice[at], self.alive[at] = xp.argmax(xp.take(logits, at))
        at = np.flatnonzero(coupled[by_request])
        if at.size:
            law = scale_and_truncate(xp, xp.take(logits, at), sampling, by_request[at])
            req = by_request[at]
            position = sampling.positions[req] + rows.offset[at]
            choice, alive = xp.coupled_argmax(law, sampling.seeds[req], position)
            self.choice[at], self.alive[at] = choice, alive
        at = np.flatnonzero(self.drawn[by_request])
        if at.size:
            part = logits if at.size == B else xp.take(logits, at)
            self.law = scale_and_truncate(xp, part, sampling, by_request[at])
            self.law_row = np.full(B, -1, dtype=np.int64)
            self.law_row[at] = np.arange(at.size)
            mass = xp.normaliser(self.law)
            self.log_mass[at] = mass
            self.alive[at] = np.isfinite(mass)

    def accept(self) -> tuple[Float, npt.NDArray[np.bool_]]:
        """Chance of acceptance and outcome, [R, gamma]; nothing beyond lens is accepted."""
        R, gamma = self.drafts.shape
        prob = np.full((R, gamma), np.nan)
        k = np.arange(gamma, dtype=np.int64)[None, :]
        verified = k < self.lens[:, None]
        row = np.where(verified, self.cu[:-1, None] + k, 0)
        ok = verified & self.alive[row]
        sure = ok & ~self.drawn[:, None]
        prob[verified] = 0.0
        prob[sure] = (self.choice[row] == self.drafts)[sure]
        drawn_at = np.nonzero(ok & self.drawn[:, None])
        if drawn_at[0].size:
            target = self._target_at(row[drawn_at], self.drafts[drawn_at])
            assert self.q is not None
            draft = self.q.at(*drawn_at)
            with np.errstate(over="ignore"):
                prob[drawn_at] = np.minimum(1.0, target / draft)
        seeds, positions = self.sampling.seeds[:, None], self.sampling.positions[:, None] + k
        u = self.rng("accept", seeds, positions)
        return prob, u < np.nan_to_num(prob)

    def _target_at(self, row: Int, ids: Int) -> Float:
        known = ids < self.vocab
        at = self.xp.gather(self.law, self.law_row[row], np.where(known, ids, 0))
        return np.where(known, np.exp(at - self.log_mass[row]), 0.0)

    def final(self, run: Int) -> tuple[Int, npt.NDArray[np.bool_]]:
        """The token after `run` accepted drafts, and whether there is none. run: int64 [R]."""
        row = self.cu[:-1] + run
        token = self.choice[row].copy()
        dead = ~self.alive[row]
        at = np.flatnonzero(self.drawn & ~dead)
        if at.size:
            token[at] = self._draw_final(at, run[at], row[at])
        token[dead] = -1
        return token, dead

    def _draw_final(self, request: Int, run: Int, row: Int) -> Int:
        p = self.xp.probabilities(self.xp.take(self.law, self.law_row[row]))
        rejected = run < self.lens[request]
        at = np.flatnonzero(rejected)
        if at.size:
            assert self.q is not None
            q = self.q.rows(request[at], run[at])
            p[at] = self.xp.subtract_clipped(self.xp.take(p, at), q)
        position = self.sampling.positions[request] + run
        u = np.empty(request.size)
        plain = self.lens[request] == 0
        cases: tuple[tuple[Purpose, npt.NDArray[np.bool_]], ...] = (
            ("residual", rejected),
            ("bonus", ~rejected & ~plain),
            ("sample", plain),
        )
        for purpose, mine in cases:
            if mine.any():
                seeds = self.sampling.seeds[request[mine]]
                u[mine] = self.rng(purpose, seeds, position[mine])
        return self.xp.draw(p, u)


def _cut(
    run: Int,
    final: Int,
    dead: npt.NDArray[np.bool_],
    drafts: Int,
    accept_prob: Float,
    lens: Int,
    sound: Int,
    sampling: SamplingBatch,
) -> VerifyResult:
    """Apply stop ids and max_new to the accepted run, and lay the tokens out flat."""
    R, gamma = drafts.shape
    k = np.arange(gamma + 1, dtype=np.int64)[None, :]
    emitted = np.concatenate([drafts, np.zeros((R, 1), dtype=np.int64)], axis=1)
    emitted[np.arange(R), run] = final
    count = run + 1 - dead
    stop = _stop_hits(emitted, sampling) & (k < count[:, None])
    hit = stop.any(axis=1)
    kept = np.where(hit, stop.argmax(axis=1) + 1, count)
    if sampling.max_new is not None:
        kept = np.minimum(kept, sampling.max_new)
    stopped = hit & (kept == stop.argmax(axis=1) + 1)
    exhausted = np.zeros(R, dtype=np.bool_)
    if sampling.max_new is not None:
        exhausted = kept >= sampling.max_new
    cut_early = kept < count
    n_accepted = np.minimum(run, kept)
    # judged: the kept accepted drafts, and the rejected one if the run was not cut before it
    judged = np.where(cut_early, n_accepted, np.minimum(run + 1, sound))
    prob = np.where(k[:, :gamma] < judged[:, None], accept_prob, np.nan)
    cu = np.zeros(R + 1, dtype=np.int64)
    np.cumsum(kept, out=cu[1:])
    return VerifyResult(
        tokens=emitted[k < kept[:, None]],
        cu_tokens=cu,
        n_accepted=n_accepted,
        final=np.where(cut_early, -1, final),
        accept_prob=prob,
        stopped=stopped,
        exhausted=exhausted,
        dead=dead & ~cut_early,
        invalid=sound < lens,
        verified=lens,
    )


def _stop_hits(emitted: Int, sampling: SamplingBatch) -> npt.NDArray[np.bool_]:
    hits = np.zeros(emitted.shape, dtype=np.bool_)
    for eos in sampling.eos_ids:
        hits |= emitted == eos
    if sampling.ignore_eos is not None:
        hits &= ~sampling.ignore_eos[:, None]
    if sampling.stop_ids is not None:
        owner = np.broadcast_to(np.arange(emitted.shape[0])[:, None], emitted.shape)
        hits |= sampling.stop_ids.contains(owner, emitted)
    return hits


def _with_logprobs(
    xp: Backend, logits: Any, cu: Int, result: VerifyResult, top: int
) -> VerifyResult:
    """Raw logprobs: emitted token i of a request comes from row i of the request."""
    count = np.diff(result.cu_tokens)
    owner = np.repeat(np.arange(count.size), count)
    within = np.arange(owner.size, dtype=np.int64) - result.cu_tokens[owner]
    rows = xp.widen(xp.take(logits, cu[owner] + within))
    mass = xp.normaliser(rows)
    own = xp.gather(rows, np.arange(owner.size, dtype=np.int64), result.tokens) - mass
    ids, values = (None, None) if top == 0 else xp.top(rows, top)
    return replace(
        result,
        logprobs=own,
        top_ids=ids,
        top_logprobs=None if values is None else values - mass[:, None],
    )
