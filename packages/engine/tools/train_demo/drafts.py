"""How the draft module does on given text: its distributions beside the trunk's."""

from __future__ import annotations

from dataclasses import dataclass

import data
import torch
from torch import Tensor
from twin import Pass, Twin


@dataclass
class DraftView:
    """One draft block per anchor, the given text as prefix of every position.

    A anchors of b drafts: `labels [A,b]` the text, `p` and `q [A,b,V]` logits of trunk and draft
    module, `confidence [A,b]` logits, `valid [A,b]` whether the text goes on that far.
    """

    labels: Tensor
    p: Tensor
    q: Tensor
    confidence: Tensor
    valid: Tensor

    def overlap(self, temperature: float = 1.0) -> Tensor:
        """Chance `[A,b]` that a draft sampled from q survives, given that those before it did."""
        p, q = (x.div(temperature).softmax(-1) for x in (self.p, self.q))
        return torch.minimum(p, q).sum(-1)


def anchors(kinds: Tensor, limit: int, seed: int) -> Tensor:
    """Positions P `[1, A]` of one row `[1, T+1]` whose next two tokens the model writes."""
    ok = (kinds[0, 1:-1] == data.ANSWER) & (kinds[0, 2:] == data.ANSWER)
    found = ok.nonzero().flatten()
    draw = torch.Generator().manual_seed(seed)
    return found[torch.randperm(len(found), generator=draw)[:limit]].sort().values.unsqueeze(0)


@torch.no_grad()
def view(twin: Twin, ids: Tensor, kinds: Tensor, at: Tensor) -> DraftView:
    """ids and kinds `[1, T+1]`, at `[1, A]`; quantised caches as when serving."""
    state = Pass("reference")
    hidden = twin.trunk(ids[:, :-1], state)
    base, z = twin.draft_block(torch.cat(state.features, -1), ids, at)
    label_at = at[0].unsqueeze(-1) + 2 + torch.arange(twin.cfg.dspark_block_size)
    last = ids.shape[1] - 1
    inside = label_at <= last
    label_at = label_at.clamp_max(last)
    bias, e = twin.markov(ids[0, label_at - 1])
    written = (kinds[0, label_at] == data.ANSWER) & inside
    return DraftView(
        labels=ids[0, label_at],
        p=twin.head(hidden[0, label_at - 1]),
        q=base[0] + bias,
        confidence=twin.confidence(z[0], e),
        valid=written.cummin(-1).values,
    )
