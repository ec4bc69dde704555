"""The sequential parts of a draft module: Markov heads and the confidence head (torch).

The backbone gives base logits U_k for all rows of the block at once. A Markov head makes draft k
depend on the token before it: logits_k = U_k + bias(x_{k-1}). The confidence head estimates the
chance that draft k survives; it sees x_{k-1} and never x_k, which is what lets a scheduler act on
it without changing the law of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from deepinfer_dspark.drafting import peak_probability, sample_drafts
from deepinfer_dspark.errors import CheckpointError
from deepinfer_dspark.sampling import SamplingBatch
from deepinfer_dspark.torch_extra import Tensor, nn, torch, wide
from deepinfer_dspark.uniforms import Uniforms

MarkovType = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """Low-rank bias from the previous token.

    vocab, rank: sizes of W1 [vocab, rank] and W2 [vocab, rank].
    kind: "vanilla" W2 W1[x]; "gated" W2 (g * e) with g = sigmoid(Wg [h; e]); "rnn" a gated state
    s over the block, z = [s; e; h], one linear to three parts (gate, candidate, output).
    hidden: width of h, needed by "gated" and "rnn".
    """

    def __init__(
        self, vocab: int, rank: int, kind: MarkovType = "vanilla", hidden: int | None = None
    ) -> None:
        super().__init__()
        if kind != "vanilla" and hidden is None:
            raise ValueError(f"MarkovHead of kind {kind!r} wants the hidden width")
        self.kind: MarkovType = kind
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        width = hidden or 0
        self.gate = nn.Linear(width + rank, rank) if kind == "gated" else None
        self.cell = nn.Linear(width + 2 * rank, 3 * rank) if kind == "rnn" else None
        nn.init.zeros_(self.markov_w2.weight)  # starts as plain DFlash and learns the correction

    def step(
        self, previous: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One position. previous: int64 [R]; hidden: [R, d]; state: [R, rank] or None (start).

        Returns (bias [R, V], embedding e [R, rank], next state).
        """
        e = self.markov_w1(previous)
        if self.gate is not None:
            g = torch.sigmoid(self.gate(torch.cat([hidden, e], dim=-1)))
            return self.markov_w2(g * e), e, None
        if self.cell is not None:
            s = torch.zeros_like(e) if state is None else state
            gate, candidate, out = self.cell(torch.cat([s, e, hidden], dim=-1)).chunk(3, dim=-1)
            g = torch.sigmoid(gate)
            s = g * s + (1.0 - g) * torch.tanh(candidate)
            return self.markov_w2(torch.tanh(out)), e, s
        return self.markov_w2(e), e, None

    def forward(self, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher-forced block. previous: int64 [N, gamma]; hidden: [N, gamma, d].

        Returns bias [N, gamma, V] and the embeddings [N, gamma, rank].
        """
        if self.cell is None:
            e = self.markov_w1(previous)
            if self.gate is not None:
                e_in = torch.sigmoid(self.gate(torch.cat([hidden, e], dim=-1))) * e
                return self.markov_w2(e_in), e
            return self.markov_w2(e), e
        state: Tensor | None = None
        biases: list[Tensor] = []
        embeddings: list[Tensor] = []
        for k in range(previous.shape[1]):
            bias, e, state = self.step(previous[:, k], hidden[:, k], state)
            biases.append(bias)
            embeddings.append(e)
        return torch.stack(biases, dim=1), torch.stack(embeddings, dim=1)


class ConfidenceHead(nn.Module):
    """w . [h_k ; W1[x_{k-1}]] (+ bias), the logit of c_k.

    Two conventions exist in released weights: the head reads the hidden state after the final
    norm and has a bias, or before the norm and has none. `bias` is chosen here; which hidden
    state is passed in is the drafter's `confidence_input`.
    """

    def __init__(self, hidden: int, rank: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1, bias=bias)

    def forward(self, hidden: Tensor, embedding: Tensor | None) -> Tensor:
        """hidden: [..., d]; embedding: [..., rank] or None. Returns logits [...]."""
        x = hidden if embedding is None else torch.cat([hidden, embedding], dim=-1)
        return self.proj(x.to(self.proj.weight.dtype))[..., 0]


def load_v41_heads(weights: Mapping[str, Tensor]) -> tuple[MarkovHead, ConfidenceHead]:
    """Markov and confidence head from V4.1 draft tensors, by their checkpoint names.

    Looks for `markov_head.embed.weight` [V, r], `markov_head.head.weight` [V, r] and
    `confidence_head.proj.weight` [1, d + r] under any prefix. The released confidence head reads
    the hidden state *before* the last norm and has no bias. The backbone (draft layers of the
    model itself) stays with whoever owns the model: feed its block states to `draft_block`.
    """

    def find(suffix: str) -> Tensor:
        hits = [t for name, t in weights.items() if name.endswith(suffix)]
        if len(hits) != 1:
            raise CheckpointError(f"wanted one tensor named *{suffix}, got {len(hits)}")
        return hits[0]

    w1, w2 = find("markov_head.embed.weight"), find("markov_head.head.weight")
    proj = find("confidence_head.proj.weight")
    vocab, rank = w1.shape
    if w2.shape != w1.shape or proj.shape[0] != 1 or proj.shape[1] <= rank:
        raise CheckpointError(
            f"heads want [V, r], [V, r] and [1, d + r], got {tuple(w1.shape)}, {tuple(w2.shape)}, "
            f"{tuple(proj.shape)}"
        )
    markov = MarkovHead(vocab, rank)
    confidence = ConfidenceHead(proj.shape[1] - rank, rank, bias=False)
    markov.load_state_dict({"markov_w1.weight": w1, "markov_w2.weight": w2})
    confidence.load_state_dict({"proj.weight": proj})
    return markov.to(w1.dtype), confidence.to(proj.dtype)


@dataclass(frozen=True, slots=True)
class BlockDraft:
    """Tokens int64 [R, gamma] (numpy), q float64 [R, gamma, V] or None, conf float64 [R, gamma] or
    None without a confidence head, peak float64 [R, gamma]: top probability of each draft law at
    temperature 1."""

    tokens: Any
    q: Any | None
    conf: Any | None
    peak: Any


def draft_block(
    base_logits: Tensor,
    hidden: Tensor,
    confidence_hidden: Tensor,
    anchors: Tensor,
    markov: MarkovHead | None,
    confidence: ConfidenceHead | None,
    sampling: SamplingBatch,
    rounds: Any,
    rng: Uniforms,
    temperatures: Any | None = None,
) -> BlockDraft:
    """Sample a block left to right from its base logits.

    base_logits: [R, gamma, V]; hidden: [R, gamma, d], what the Markov head reads;
    confidence_hidden: [R, gamma, d]; anchors: int64 [R]; temperatures: [gamma], calibration of the
    confidences (`Calibrator`). q is left out when every request is greedy: the drafts are then a
    function of the prefix.
    """
    R, gamma = base_logits.shape[:2]
    random = bool((sampling.temperature > 0).any())
    tokens = np.zeros((R, gamma), dtype=np.int64)
    conf = np.zeros((R, gamma)) if confidence is not None else None
    peak = np.zeros((R, gamma))
    laws: list[Tensor] = []
    previous, state = anchors, None
    for k in range(gamma):
        logits, e = base_logits[:, k], None
        if markov is not None:
            bias, e, state = markov.step(previous, hidden[:, k], state)
            logits = logits + bias
        if confidence is not None and conf is not None:
            z = confidence(confidence_hidden[:, k], e).double()
            scale = 1.0 if temperatures is None else float(temperatures[k])
            conf[:, k] = torch.sigmoid(z / scale).cpu().numpy()
        peak[:, k] = peak_probability(logits)
        tokens[:, k], law = sample_drafts(wide(logits), sampling, rounds, k, rng)
        if random:
            laws.append(law)
        previous = torch.from_numpy(tokens[:, k]).to(anchors.device)
    return BlockDraft(tokens, torch.stack(laws, dim=1) if random else None, conf, peak)
