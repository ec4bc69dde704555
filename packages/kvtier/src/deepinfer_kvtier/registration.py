"""Memory that tiers may pin for transfers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from deepinfer_kvtier.buffers import bytes_of


@runtime_checkable
class PinsMemory(Protocol):
    """What a tier adds to `Tier` when it gains from registered memory (RDMA, shared rings)."""

    def register_memory(self, address: int, length: int) -> None:
        """Prepare a range for transfers. raises: OSError."""
        ...

    def unregister_memory(self, address: int, length: int) -> None:
        """Forget a range; no transfer uses it any more. raises: OSError."""
        ...


class Registration:
    """One registered buffer; keeps it alive until `close`. Works as a context manager."""

    def __init__(self, buffer: Any, address: int, length: int, tiers: list[PinsMemory]) -> None:
        self._buffer = buffer
        self.tiers = tiers
        self.address = address
        self.length = length

    def close(self) -> None:
        """End the registration; a second call does nothing. raises: OSError."""
        while self.tiers:
            self.tiers.pop().unregister_memory(self.address, self.length)
        self._buffer = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def register(buffer: Any, tiers: Sequence[object]) -> Registration:
    """Register a buffer with every tier that pins memory; all or none. raises: OSError."""
    view = np.frombuffer(bytes_of(buffer), dtype=np.uint8)
    address = int(view.__array_interface__["data"][0])
    registration = Registration(buffer, address, view.nbytes, [])
    for tier in tiers:
        if isinstance(tier, PinsMemory):
            try:
                tier.register_memory(address, view.nbytes)
            except OSError:
                registration.close()
                raise
            registration.tiers.append(tier)
    return registration
