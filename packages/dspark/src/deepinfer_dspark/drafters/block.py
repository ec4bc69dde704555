"""`DSparkDrafter`: block drafts from target features, whatever the form of the draft module."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_dspark.calibration import ProxyConfidence
from deepinfer_dspark.drafters.block_module import BlockModule
from deepinfer_dspark.drafters.checkpoint import read_config
from deepinfer_dspark.drafters.contexts import Contexts, new_features
from deepinfer_dspark.drafters.deepspec import load_deepspec
from deepinfer_dspark.drafters.heads import draft_block
from deepinfer_dspark.drafters.v41 import load_v41
from deepinfer_dspark.drafting import DraftBatch
from deepinfer_dspark.errors import CheckpointError
from deepinfer_dspark.proposal import Proposal
from deepinfer_dspark.torch_extra import Tensor, torch
from deepinfer_dspark.uniforms import Uniforms
from deepinfer_dspark.verification import VerifyResult


class DSparkDrafter:
    """Drafts of a `BlockModule`; keeps the context entries of every request.

    The batch must carry `features` of all rows committed since the last round: the first round of
    a request brings the whole prompt but the anchor, or nothing (then no draft is made).
    temperatures: calibration, [gamma].
    """

    def __init__(self, module: BlockModule, temperatures: Any | None = None) -> None:
        self._module = module
        self._temperatures = temperatures
        self._contexts = Contexts(module.window)
        self._proxy = ProxyConfidence(module.block_size)
        self.max_tokens = module.block_size

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        embed: Tensor | None = None,
        lm_head: Tensor | None = None,
        temperatures: Any | None = None,
        dtype: torch.dtype | None = None,
    ) -> DSparkDrafter:
        """Read a checkpoint directory of the DeepSpec or of the V4.1 form, told by its config.json.

        embed, lm_head: the target's [V, d] weights where the checkpoint does not carry them;
        dtype: what to compute in, default that of the checkpoint.
        Raises CheckpointError naming what is missing, unknown or of another shape.
        """
        v41 = str(read_config(directory).get("model_type", "")).startswith("deepseek_v41")
        load = load_v41 if v41 else load_deepspec
        return cls(load(directory, embed=embed, lm_head=lm_head, dtype=dtype), temperatures)

    @torch.no_grad()
    def propose(self, batch: DraftBatch, rng: Uniforms) -> Proposal:
        """See `Drafter.propose`."""
        m = self._module
        for i, features, at in new_features(batch, self._contexts):
            self._contexts.append(batch.request_ids[i], m.context(features.to(m.dtype), at))
        R, gamma = batch.requests, self.max_tokens
        room = batch.room(gamma)
        ready = [i for i, r in enumerate(batch.request_ids) if room[i] and r in self._contexts]
        tokens, lengths = np.zeros((R, gamma), dtype=np.int64), np.zeros(R, dtype=np.int64)
        conf = np.zeros((R, gamma))
        if not ready:
            return Proposal(tokens, lengths, conf=conf)
        index, ids = np.array(ready), [batch.request_ids[i] for i in ready]
        entries, visible = self._contexts.padded(ids)
        anchors, positions = (torch.from_numpy(x[index]) for x in (batch.anchors, batch.positions))
        states = m.block(anchors, positions, entries, visible)
        drafted = draft_block(
            states.logits, states.hidden, states.confidence_hidden, anchors, m.markov_head,
            m.confidence_head, batch.sampling.select(index), batch.rounds[index], rng,
            self._temperatures,
        )  # fmt: skip
        tokens[index], lengths[index] = drafted.tokens, room[index]
        if m.confidence_head is None:
            conf[index] = self._proxy.of(ids, drafted.peak)
        else:
            conf[index] = drafted.conf
        q = drafted.q
        if q is not None and len(ready) < R:
            dense = q.new_zeros((R, gamma, q.shape[2]))
            dense[index] = q
            q = dense
        return Proposal(tokens, lengths, q=q, conf=conf)

    def observe(self, request_ids: Sequence[Hashable], result: VerifyResult) -> None:
        """Without a confidence head the proxy follows what was accepted; a head needs nothing."""
        self._proxy.observe(request_ids, result)

    def reset(self, request_id: Hashable) -> None:
        """Drop the context of a request."""
        self._contexts.drop(request_id)
        self._proxy.reset(request_id)

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Share the context: entries are never written in place."""
        self._contexts.fork(request_id, new_id)


class DFlashDrafter(DSparkDrafter):
    """The same backbone without a Markov head (rank 0); its drafts ignore each other."""

    def __init__(self, module: BlockModule, temperatures: Any | None = None) -> None:
        if module.markov_head is not None:
            raise CheckpointError("a DFlash checkpoint has markov_rank 0: use DSparkDrafter")
        super().__init__(module, temperatures)
