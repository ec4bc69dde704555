"""What every drafter promises, as tests to inherit.

A drafter of yours is tested by a subclass, in a file that pytest collects::

    class TestMyDrafter(DrafterContract):
        def make(self):
            return MyDrafter(max_tokens=4)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import Int, to_host
from deepinfer_dspark.drafting import DraftBatch, Drafter
from deepinfer_dspark.loop import SpecLoop, TargetOutput
from deepinfer_dspark.proposal import Proposal, SparseQ
from deepinfer_dspark.reference import LawSpec, law_of
from deepinfer_dspark.sampling import SamplingBatch
from deepinfer_dspark.uniforms import CounterRng

__all__ = ["DrafterContract", "PairTarget"]

_TOO_FAR = 5.0
"""Standard deviations: of the few counts here, chance passes it about once in a million runs."""


class PairTarget:
    """A target whose logits depend on the last two tokens alone, so that its law is a table.

    features: width of the hidden states it hands to drafters, 0 for none.
    """

    max_length = None

    def __init__(self, vocab_size: int = 6, *, seed: int = 0, features: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self.table = 2.0 * rng.normal(size=(vocab_size, vocab_size, vocab_size))
        self._hidden = rng.normal(size=(vocab_size, features)) if features else None

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any | None]:
        """See `Target.start`; the state is the fed tokens of each request."""
        state = [list(p[:-1]) for p in prompts]
        fed = np.array([t for row in state for t in row], dtype=np.int64)
        return state, self._features(fed)

    def forward(self, tokens: Int, cu_lens: Int, positions: Int, state: Any) -> TargetOutput:
        """See `Target.forward`."""
        out: list[npt.NDArray[np.float64]] = []
        self._fed = np.diff(cu_lens)
        for r, text in enumerate(state):
            for token in tokens[cu_lens[r] : cu_lens[r + 1]].tolist():
                text.append(token)
                out.append(self.logits(text))
        return TargetOutput(np.stack(out), self._features(tokens))

    def logits(self, text: Sequence[int]) -> npt.NDArray[np.float64]:
        """Of the token behind a text, float64 [vocab_size]."""
        before = text[-2] if len(text) > 1 else 0
        return self.table[before, text[-1]]

    def commit(self, state: Any, keep: Int) -> None:
        """See `Target.commit`."""
        for r, text in enumerate(state):
            del text[len(text) - int(self._fed[r] - keep[r]) :]

    def select(self, state: Any, requests: Int) -> Any:
        """See `Target.select`."""
        return [state[r] for r in requests.tolist()]

    def _features(self, tokens: Int) -> Any | None:
        return None if self._hidden is None else self._hidden[tokens]


class DrafterContract(ABC):
    """What every drafter promises; subclass it as a test class and say how one is made.

    features: width of the hidden states it needs of the target; 0 for none.
    """

    vocab_size = 6
    features = 0
    cases = 3000
    """Sampled texts that are counted."""

    @abstractmethod
    def make(self) -> Drafter:
        """A drafter that has seen nothing, for ids 0..vocab_size-1."""
        ...

    def test_greedy_text_is_that_of_the_target_alone(self) -> None:
        prompts = self._prompts(4)
        sampling = SamplingBatch.greedy(len(prompts))
        target = self._target()
        alone = SpecLoop(None, self._target()).generate(prompts, sampling, 20)
        drafted = SpecLoop(self.make(), target).generate(prompts, sampling, 20)
        assert drafted.tokens == alone.tokens

    def test_sampled_tokens_keep_the_distribution_of_the_target(self) -> None:
        target, prompt = self._target(), self._prompts(1)[0]
        for temperature in (1.0, 0.5):
            sampling = replace(
                SamplingBatch.uniform(self.cases, temperature=temperature),
                seeds=np.arange(self.cases, dtype=np.uint64),
            )
            loop = SpecLoop(self.make(), self._target())
            made = loop.generate([prompt] * self.cases, sampling, 2)
            counts = Counter((tokens[0], tokens[1]) for tokens in made.tokens)
            spec = LawSpec(temperature=temperature)
            first = law_of(target.logits(prompt).tolist(), spec)
            for a, b in product(range(self.vocab_size), repeat=2):
                p = first[a] * law_of(target.logits([*prompt, a]).tolist(), spec)[b]
                off = counts[a, b] - self.cases * p
                spread = max((self.cases * p * (1 - p)) ** 0.5, 1.0)
                assert abs(off) < _TOO_FAR * spread, f"tokens {a}, {b} at {temperature}: {off:+.0f}"

    def test_coupled_text_is_that_of_the_target_alone(self) -> None:
        prompts = self._prompts(4)
        sampling = SamplingBatch.uniform(len(prompts), temperature=0.8)
        sampling = replace(sampling, coupled=np.ones(len(prompts), dtype=np.bool_))
        alone = SpecLoop(None, self._target()).generate(prompts, sampling, 12)
        drafted = SpecLoop(self.make(), self._target()).generate(prompts, sampling, 12)
        assert drafted.tokens == alone.tokens

    def test_the_same_seed_gives_the_same_text(self) -> None:
        prompts, texts = self._prompts(3), list[list[list[int]]]()
        for _ in range(2):
            sampling = SamplingBatch.uniform(len(prompts), temperature=0.9)
            texts.append(
                SpecLoop(self.make(), self._target()).generate(prompts, sampling, 12).tokens
            )
        assert texts[0] == texts[1]

    def test_a_proposal_fits_its_batch(self) -> None:
        for sampling in (SamplingBatch.greedy(3), SamplingBatch.uniform(3, temperature=1.0)):
            drafter = self.make()
            proposal = drafter.propose(self._batch(sampling), CounterRng())
            assert proposal.tokens.shape[0] == 3
            assert proposal.gamma <= drafter.max_tokens
            for r, n in enumerate(proposal.lengths.tolist()):
                own = proposal.tokens[r, :n]
                assert ((own >= 0) & (own < self.vocab_size)).all(), own
                for k, token in enumerate(own.tolist()):
                    self._check_q(proposal, r, k, token)
            if proposal.conf is not None:
                used = np.arange(proposal.gamma)[None, :] < proposal.lengths[:, None]
                conf = proposal.conf[used]
                assert ((conf >= 0) & (conf <= 1)).all(), conf

    def test_no_more_drafts_than_wanted(self) -> None:
        batch = self._batch(SamplingBatch.greedy(3))
        wanted = np.array([0, 1, 100])
        proposal = self.make().propose(replace(batch, wanted=wanted), CounterRng())
        assert (proposal.lengths <= wanted).all(), proposal.lengths

    def test_an_empty_batch_is_legal(self) -> None:
        proposal = self.make().propose(self._batch(SamplingBatch.greedy(0)), CounterRng())
        assert proposal.requests == 0

    def test_a_request_that_was_reset_is_a_new_one(self) -> None:
        batch = self._batch(SamplingBatch.greedy(3))
        fresh = self.make().propose(batch, CounterRng())
        used = self.make()
        used.propose(batch, CounterRng())
        for request in batch.request_ids:
            used.reset(request)
        used.reset("never seen")
        again = used.propose(batch, CounterRng())
        assert again.tokens[:, : again.gamma].tolist() == fresh.tokens.tolist()

    def test_a_fork_drafts_as_its_origin(self) -> None:
        drafter = self.make()
        batch = self._batch(SamplingBatch.greedy(1))
        drafter.propose(batch, CounterRng())
        drafter.fork(batch.request_ids[0], "twin")
        history = [*batch.history[0], int(batch.history[0][0])]
        later: dict[str, Any] = {
            "history": [history],
            "anchors": np.array(history[-1:]),
            "positions": batch.positions + 1,
            "rounds": batch.rounds + 1,
        }
        if self.features:
            one = self._target().start([[history[-2], 0]])[1]
            later |= {"features": one, "feature_cu": np.array([0, 1])}
        origin = drafter.propose(replace(batch, **later), CounterRng())
        twin = drafter.propose(replace(batch, **later, request_ids=["twin"]), CounterRng())
        assert twin.tokens.tolist() == origin.tokens.tolist()

    def _target(self) -> PairTarget:
        return PairTarget(self.vocab_size, seed=7, features=self.features)

    def _prompts(self, count: int) -> list[list[int]]:
        """Texts that repeat themselves, for drafters that copy."""
        rng = np.random.default_rng(3)
        return [rng.integers(0, self.vocab_size, 4 + i).tolist() * 2 for i in range(count)]

    def _batch(self, sampling: SamplingBatch) -> DraftBatch:
        """A first round."""
        R = sampling.requests
        prompts = self._prompts(R)
        features = self._target().start(prompts)[1]
        lengths = np.array([len(p) for p in prompts], dtype=np.int64)
        return DraftBatch(
            request_ids=list(range(R)),
            anchors=np.array([p[-1] for p in prompts], dtype=np.int64),
            positions=lengths - 1,
            history=prompts,
            sampling=sampling,
            rounds=np.zeros(R, dtype=np.int64),
            features=features,
            feature_cu=None if features is None else np.concatenate([[0], np.cumsum(lengths - 1)]),
        )

    def _check_q(self, proposal: Proposal, r: int, k: int, token: int) -> None:
        """The law that a draft was drawn from is one, and holds the draft."""
        if proposal.q is None:
            return
        if isinstance(proposal.q, SparseQ):
            probs = to_host(proposal.q.probs)[r, k]
            own = probs[to_host(proposal.q.ids)[r, k] == token].sum()
        else:
            probs = to_host(proposal.q)[r, k]
            own = probs[token]
        assert (probs >= 0).all()
        assert abs(float(probs.sum()) - 1.0) < 1e-5, probs.sum()
        assert own > 0, f"request {r}: draft {k} has probability 0 in its own q"
