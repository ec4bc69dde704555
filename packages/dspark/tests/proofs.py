"""Exact enumeration of one verification round: every draft, acceptance and final draw, weighted.

A toy target and drafter over V tokens give logits as a function of the prefix. The law of the
first gamma + 1 tokens is summed over all outcomes, completed with the target's own law where the
round emitted fewer, and compared with the target's law of those tokens. Nothing is sampled.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from deepinfer_dspark import (
    BudgetScheduler,
    Penalties,
    Proposal,
    RaggedIds,
    SamplingBatch,
    SparseQ,
    StepTable,
    Verifier,
)
from deepinfer_dspark.arrays import to_host
from deepinfer_dspark.reference import LawSpec, invert, law_of, residual

Path = tuple[int, ...]


def stored(x: np.ndarray, dtype: str):
    """x as an engine would hand it over: numpy or torch, in the given dtype."""
    if not dtype.startswith("torch."):
        return x.astype(dtype)
    import torch

    return torch.from_numpy(x).to(getattr(torch, dtype.removeprefix("torch.")))


class Scripted:
    """Uniforms read from tables: [case] for final draws, [case, k] for acceptance and drafts."""

    def __init__(self, accept: np.ndarray, draft: np.ndarray, final: np.ndarray) -> None:
        self.tables = {"accept": accept, "draft": draft}
        self.final = final

    def __call__(self, purpose, seeds, positions):
        case, at = np.broadcast_arrays(np.asarray(seeds).astype(np.int64), np.asarray(positions))
        if purpose in self.tables:
            table = self.tables[purpose]
            return table[case, np.minimum(at, table.shape[1] - 1)]
        return self.final[case]


@dataclass
class Toy:
    """Random logits by prefix; conf(prefix) is the confidence of the draft after it."""

    vocab: int
    gamma: int
    seed: int = 0
    target: LawSpec = field(default_factory=LawSpec)
    draft: LawSpec = field(default_factory=LawSpec)
    allowed: Callable[[Path], set[int]] | None = None
    q_form: str = "dense"  # dense | sparse | point
    output: Path = ()
    prompt: Path = ()
    dtype: str = "float64"  # what the target's logits are stored in; "torch." in front: a tensor

    def __post_init__(self) -> None:
        # the laws are functions of the prefix: remember them, the sums ask thousands of times
        for name in ("logits", "p", "q", "conf"):
            setattr(self, name, functools.cache(getattr(self, name)))

    def _random(self, kind: int, prefix: Path) -> np.random.Generator:
        return np.random.default_rng([self.seed, kind, len(prefix), *prefix])

    def logits(self, prefix: Path) -> np.ndarray:
        made = self._random(0, prefix).normal(size=self.vocab) * 1.5
        # the distribution is that of the stored numbers, whatever they are stored in
        return np.asarray(to_host(stored(made[None], self.dtype))[0], dtype=np.float64)

    def conf(self, prefix: Path) -> float:
        return float(self._random(2, prefix).random())

    def p(self, prefix: Path) -> list[float]:
        allowed = None if self.allowed is None else self.allowed(prefix)
        return law_of(
            self.logits(prefix).tolist(),
            self.target,
            output=[*self.output, *prefix],
            prompt=self.prompt,
            allowed=allowed,
        )

    def q(self, prefix: Path) -> list[float]:
        logits = self.logits(prefix) + self._random(1, prefix).normal(size=self.vocab)
        law = law_of(logits.tolist(), self.draft)
        if self.q_form == "point":
            best = int(np.argmax(law))
            return [1.0 if t == best else 0.0 for t in range(self.vocab)]
        return law

    def paths(self) -> list[tuple[Path, float]]:
        out = []
        for path in itertools.product(range(self.vocab), repeat=self.gamma):
            weight = float(np.prod([self.q(path[:k])[path[k]] for k in range(self.gamma)]))
            if weight > 0:
                out.append((path, weight))
        return out

    def law(self) -> np.ndarray:
        """Target law of the first gamma + 1 tokens, shape [V] * (gamma + 1)."""
        out = np.zeros((self.vocab,) * (self.gamma + 1))
        for seq in itertools.product(range(self.vocab), repeat=self.gamma + 1):
            out[seq] = np.prod([self.p(seq[:k])[seq[k]] for k in range(self.gamma + 1)])
        return out


def sampling_of(toy: Toy, cases: int) -> SamplingBatch:
    spec = toy.target
    penalties = None
    if (spec.presence, spec.frequency, spec.repetition) != (0.0, 0.0, 1.0):
        ids, counts = np.unique(np.array(toy.output, dtype=np.int64), return_counts=True)
        penalties = Penalties(
            output=RaggedIds.of([ids.tolist()] * cases, [counts.tolist()] * cases),
            prompt=RaggedIds.of([list(toy.prompt)] * cases),
            presence=np.full(cases, spec.presence),
            frequency=np.full(cases, spec.frequency),
            repetition=np.full(cases, spec.repetition),
        )
    return SamplingBatch(
        temperature=np.full(cases, spec.temperature),
        seeds=np.arange(cases, dtype=np.uint64),
        positions=np.zeros(cases, dtype=np.int64),
        top_p=np.full(cases, spec.top_p),
        top_k=np.full(cases, spec.top_k, dtype=np.int64),
        min_p=np.full(cases, spec.min_p),
        penalties=penalties,
        logit_bias=RaggedIds.of([list(spec.bias)] * cases, [list(spec.bias.values())] * cases)
        if spec.bias
        else None,
        banned=RaggedIds.of([list(spec.banned)] * cases) if spec.banned else None,
    )


def round_law(toy: Toy, path: Path, length: int, verifier: Verifier, transform=None) -> np.ndarray:
    """Law of the first gamma + 1 tokens given the drafts and how many of them are verified."""
    p = [toy.p(path[:k]) for k in range(length + 1)]
    q = [toy.q(path[:k]) for k in range(toy.gamma)]
    accept_at = [min(1.0, p[k][path[k]] / q[k][path[k]]) for k in range(length)]
    cases: list[tuple[float, list[float], list[float], float]] = []
    draft_mid = []
    for k in range(toy.gamma):
        low = sum(q[k][: path[k]])
        draft_mid.append(low + q[k][path[k]] / 2)
    for bits in itertools.product([True, False], repeat=length):
        weight, u = 1.0, []
        for k, yes in enumerate(bits):
            a = accept_at[k]
            weight *= a if yes else 1.0 - a
            u.append(a / 2 if yes else (1.0 + a) / 2)
        if weight <= 0:
            continue
        run = bits.index(False) if False in bits else length
        final = residual(p[run], q[run]) if run < length else p[length]
        # finer cells than the right law needs, so that a wrong law is not hidden by the midpoints
        edges = {0.0, 1.0, *np.cumsum(final), *np.cumsum(p[run])}
        edges |= set(np.cumsum(q[run])) if run < length else set()
        points = sorted(e for e in edges if 0.0 <= e <= 1.0)
        for low, high in itertools.pairwise(points):
            cases.append((weight * (high - low), u, draft_mid, (low + high) / 2))
    n = len(cases)
    accept = np.array([c[1] + [0.5] * (toy.gamma - length) for c in cases]).reshape(n, toy.gamma)
    draft = np.array([c[2] for c in cases]).reshape(n, toy.gamma)
    rng = Scripted(accept, draft, np.array([c[3] for c in cases]))
    logits = np.tile(np.stack([toy.logits(path[:k]) for k in range(length + 1)]), (n, 1))
    logits = stored(logits, toy.dtype)
    masks = None
    if toy.allowed is not None:
        one = np.zeros((length + 1, toy.vocab), dtype=np.bool_)
        for k in range(length + 1):
            one[k, list(toy.allowed(path[:k]))] = True
            if k and path[k - 1] not in toy.allowed(path[: k - 1]):
                one[k:] = False  # rows behind an illegal draft hold anything
                break
        masks = np.tile(one, (n, 1))
    proposal = proposal_of(toy, path, q, n)
    result = verifier.verify(
        logits,
        np.arange(n + 1) * (length + 1),
        proposal,
        np.full(n, length),
        sampling_of(toy, n),
        masks,
        rng,
    )
    out = np.zeros((toy.vocab,) * (toy.gamma + 1))
    for i, (weight, *_rest) in enumerate(cases):
        tokens = tuple(result.emitted(i))
        if transform is not None:
            tokens = transform(tokens)
        complete(toy, tokens, weight, out)
    return out


def proposal_of(toy: Toy, path: Path, q: list[list[float]], n: int) -> Proposal:
    tokens = np.tile(np.array(path, dtype=np.int64), (n, 1)).reshape(n, toy.gamma)
    lengths = np.full(n, toy.gamma)
    if toy.q_form == "point":
        return Proposal(tokens, lengths)
    dense = np.tile(np.array(q)[None], (n, 1, 1)).reshape(n, toy.gamma, toy.vocab)
    if toy.q_form == "sparse":
        order = np.argsort(-dense, axis=2, kind="stable")
        return Proposal(tokens, lengths, q=SparseQ(order, np.take_along_axis(dense, order, 2)))
    return Proposal(tokens, lengths, q=dense)


def complete(toy: Toy, tokens: Path, weight: float, out: np.ndarray) -> None:
    if len(tokens) == toy.gamma + 1:
        out[tokens] += weight
        return
    for t, mass in enumerate(toy.p(tokens)):
        if mass > 0:
            complete(toy, (*tokens, t), weight * mass, out)


def output_law(
    toy: Toy, scheduler: BudgetScheduler, budget: int, verifier: Verifier, choose=None
) -> np.ndarray:
    """Law of a request's first tokens when `budget` was fixed beforehand (or `choose` does)."""
    out = np.zeros((toy.vocab,) * (toy.gamma + 1))
    for path, weight in toy.paths():
        conf = np.array([[toy.conf(path[:k]) for k in range(toy.gamma)]])
        lens = scheduler.allocate(budget, conf) if choose is None else choose(conf)
        out += weight * round_law(toy, path, int(lens[0]), verifier)
    return out


def joint_law(
    toys: tuple[Toy, Toy], scheduler: BudgetScheduler, budget: int, verifier: Verifier, choose=None
) -> np.ndarray:
    """Joint law of two requests competing for one budget, flattened [N1, N2]."""
    cache: dict[tuple[int, Path, int], np.ndarray] = {}

    def law(i: int, path: Path, length: int) -> np.ndarray:
        if (i, path, length) not in cache:
            cache[i, path, length] = round_law(toys[i], path, length, verifier).ravel()
        return cache[i, path, length]

    total: np.ndarray | float = 0.0
    for (a, wa), (b, wb) in itertools.product(toys[0].paths(), toys[1].paths()):
        conf = np.array(
            [[t.conf(x[:k]) for k in range(t.gamma)] for t, x in zip(toys, (a, b), strict=True)]
        )
        lens = scheduler.allocate(budget, conf) if choose is None else choose(conf)
        total = total + wa * wb * np.outer(law(0, a, int(lens[0])), law(1, b, int(lens[1])))
    assert isinstance(total, np.ndarray)
    return total


def table() -> StepTable:
    return StepTable((1, 2, 3, 4, 5, 6, 7, 8), (1.0, 1.2, 1.5, 2.0, 2.1, 2.6, 3.0, 3.5))


__all__ = ["Scripted", "Toy", "invert", "joint_law", "output_law", "round_law", "table"]
