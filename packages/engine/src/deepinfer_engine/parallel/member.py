"""A process of an expert group other than the first: `python -m deepinfer_engine.parallel.member`.

It is a child of the leader, which tells it over a pipe how to load and then what to compute. It
ends with the leader, and on any failure: the leader then ends too, and both are started again.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_engine.errors import EngineError
from deepinfer_engine.model.family import CacheQuant, LoadedModel, LoadOptions, ReplayMode
from deepinfer_engine.model.registry import family_of
from deepinfer_engine.parallel import network
from deepinfer_engine.parallel.channel import Channel
from deepinfer_engine.parallel.messages import Setup, read_rows
from deepinfer_engine.parallel.model import answer_shape
from deepinfer_engine.parallel.seat import Seat

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def opened() -> tuple[Channel, dict[str, Any]] | None:
    """The pipe to the leader and its first message, in a process that ends with the leader; None
    where that has ended already."""
    leader = os.getppid()
    # SIGKILL: one that a signal holds would never see another.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:
        return None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a drain needs the whole group: the leader ends it
    channel = Channel(0, os.dup(1))
    os.dup2(2, 1)  # what libraries print is no message
    body = channel.receive()
    if body is None:
        return None
    logging.basicConfig(
        level=logging.INFO, format=f"%(levelname)s rank {body.get('rank')}: %(message)s"
    )
    return channel, body


def main() -> None:
    """Load, say so, compute until the leader closes the pipe."""
    begun = opened()
    if begun is None:
        return
    channel, body = begun
    setup = Setup.read(body)
    try:
        model, seat = load(setup)
        channel.send({"ready": True})
        exchange = network.join(setup.store, setup.rank, setup.size, setup.deadline_s)
        seat.join(exchange, setup.deadline_s)
        compute(model, seat, channel)
    except EngineError as error:
        channel.send({"failed": str(error), "kind": type(error).__name__})
        sys.exit(1)


def load(setup: Setup) -> tuple[LoadedModel, Seat]:
    """The model with this process's share of the experts, over the memory of the leader's pools."""
    torch.set_num_threads(setup.threads)
    seat = Seat(setup.rank, setup.size, setup.pools, setup.balancing)
    quant: CacheQuant = "none" if setup.cache_quant == "none" else "reference"
    replay: ReplayMode = "mask" if setup.replay == "mask" else "off"
    if setup.replay == "compact":
        replay = "compact"
    options = LoadOptions(
        dtype=setup.dtype,
        cache_quant=quant,
        vision=False,
        replay=replay,
        keep=setup.keep,
        seat=seat,
        batch_invariant=setup.batch_invariant,
    )
    directory = Path(setup.model)
    model = family_of(directory).load(
        directory, options, num_blocks=setup.num_blocks, num_slots=setup.num_slots
    )
    return model, seat


def compute(model: LoadedModel, seat: Seat, channel: Channel) -> None:
    """One forward pass for each message, until there is none."""
    while (body := channel.receive()) is not None:
        rows = read_rows(body["rows"])
        wanted = torch.tensor(body["wanted"], dtype=torch.int64)
        logits: Tensor = model.forward(rows, wanted)
        if rows:
            shape = answer_shape(*logits.shape)
            network.send(logits if len(wanted) else logits.new_zeros(shape), 0)
        seat.ended()


if __name__ == "__main__":
    main()
