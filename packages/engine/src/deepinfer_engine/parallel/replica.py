"""A group of processes that each schedule requests of their own and share a model's experts.

`parallel.leader` divides the rows of one schedule; here every rank has its own schedule, caches and
drafts, and all run one forward pass a step, which they vote on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepinfer_engine.model.family import LoadedModel
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.parallel import memory, network
from deepinfer_engine.parallel.ballot import GlooSums
from deepinfer_engine.parallel.channel import Channel
from deepinfer_engine.parallel.leader import ExpertGroup
from deepinfer_engine.parallel.messages import Setup
from deepinfer_engine.parallel.model import GroupModel
from deepinfer_engine.parallel.seat import Seat


class ReplicaModel(GroupModel):
    """Implements `LoadedModel`: the whole batch of this rank, experts wherever they are."""

    def __init__(self, model: LoadedModel, seat: Seat) -> None:
        """See `GroupModel`."""
        super().__init__(model, seat, ())

    def forward(self, rows: Sequence[SequenceRows], logit_rows: Tensor | None) -> Tensor:
        """See `LoadedModel.forward`; without rows it takes part for the others' tokens."""
        wanted = logit_rows if rows else torch.empty(0, dtype=torch.int64)
        logits = self._model.forward(rows, wanted)
        self._seat.ended()
        return logits


class ReplicaSeat:
    """Implements `ExpertLeader` in the ranks other than the first."""

    def __init__(self, setup: Setup, channel: Channel) -> None:
        self._setup, self._channel = setup, channel
        # Every rank has caches of its own.
        self.seat = Seat(setup.rank, setup.size, memory.create(), setup.balancing)
        self.sums = GlooSums()

    def lead(self, model: LoadedModel) -> ReplicaModel:
        """Join the group, once the first rank knows that this one has loaded."""
        self._channel.send({"ready": True})
        setup = self._setup
        exchange = network.join(setup.store, setup.rank, setup.size, setup.deadline_s)
        self.seat.join(exchange, setup.deadline_s)
        return ReplicaModel(model, self.seat)


class ReplicaGroup(ExpertGroup):
    """Owner of the other ranks, itself the first."""

    def __init__(self, setup: Setup, module: str, spec: dict[str, Any]) -> None:
        """module: what the others run; spec: their engine's."""
        self._module, self._spec = module, spec
        self.sums = GlooSums()
        super().__init__(setup)

    def lead(self, model: LoadedModel) -> ReplicaModel:
        """See `ExpertGroup.lead`."""
        self._join()
        return ReplicaModel(model, self.seat)

    def command(self) -> str:
        """See `ExpertGroup.command`."""
        return self._module

    def body_for(self, rank: int) -> dict[str, Any]:
        """See `ExpertGroup.body_for`."""
        return {**replace(self._setup, rank=rank, pools={}).body(), "spec": self._spec}
