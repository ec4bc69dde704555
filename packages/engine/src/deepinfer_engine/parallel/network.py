"""The gloo group of the processes of one worker: on loopback, found over a file of the owner's.

Gloo neither authenticates nor encrypts. So its sockets are bound to loopback alone, whatever the
cluster's key: a group lives on one machine. Nothing here pickles.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from deepinfer_engine.adapters.kernels import GlooExchange
from deepinfer_engine.errors import ConfigError, EngineLost

LOOPBACK = ("lo", "lo0")


def join(store: str, rank: int, size: int, deadline_s: float) -> GlooExchange:
    """Become a member; every process calls it. A call later on that is not answered in
    `deadline_s` ends with an error. Raises ConfigError, EngineLost."""
    if dist.is_initialized():
        raise ConfigError("a process is in one group at a time: close the other one first")
    names = [name for _, name in socket.if_nameindex() if name in LOOPBACK]
    if not names:
        raise ConfigError(f"no loopback interface ({' or '.join(LOOPBACK)}) to share experts over")
    os.environ["GLOO_SOCKET_IFNAME"] = names[0]  # read whenever a group is made
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=deadline_s),
        )
    except RuntimeError as error:
        raise EngineLost(f"the processes of the expert group did not meet: {error}") from error
    return GlooExchange()


def leave() -> None:
    """End the group of this process, if it has one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def send(rows: Tensor, to: int) -> None:
    """Rows that `receive` waits for. Raises EngineLost."""
    _call(dist.send, rows.contiguous(), to)


def receive(rows: Tensor, sender: int) -> None:
    """Fill rows of a known shape. Raises EngineLost."""
    _call(dist.recv, rows, sender)


def _call(call: Any, rows: Tensor, peer: int) -> None:
    if rows.numel():
        try:
            call(rows, peer)
        except RuntimeError as error:
            raise EngineLost(f"process {peer} of the expert group was lost: {error}") from error
