"""What the interpreter cannot see by running one lane after the other: accesses without an order.

On a device the lanes of a program run together until a barrier, and programs run in any order. So
while a kernel is interpreted its stores are remembered: an address may not be stored twice, or
loaded after it was stored, without a barrier between, nor touched by a second program once one has
stored to it. A lane that reads back what itself stored would be in order on a device and is refused
here too: kernels that pass keep to the stricter rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_kernels.errors import NumericsError

__all__ = ["Order"]

Addresses = Any  # an int64 array


class _Stored:
    """Addresses that were stored, with their bounds: most accesses are far from all of them."""

    def __init__(self) -> None:
        self._parts: list[Addresses] = []
        self._low, self._high = 2**63 - 1, -(2**63)

    def add(self, addresses: Addresses) -> None:
        self._parts.append(addresses)
        self._low = min(self._low, int(addresses.min()))
        self._high = max(self._high, int(addresses.max()))

    def join(self, other: _Stored) -> None:
        self._parts += other._parts
        self._low, self._high = min(self._low, other._low), max(self._high, other._high)

    def holds(self, addresses: Addresses) -> bool:
        if not self._parts or int(addresses.max()) < self._low:
            return False
        if int(addresses.min()) > self._high:
            return False
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return bool(np.isin(addresses, self._parts[0]).any())


class Order:
    """The stores of one launch so far. Every method raises NumericsError for what has no order."""

    def __init__(self) -> None:
        self.launch()

    def launch(self) -> None:
        """A new grid: everything before it is done."""
        self._others = _Stored()
        self._own = _Stored()
        self._fresh = _Stored()

    def program(self) -> None:
        """The next program of the grid."""
        self.barrier()
        self._others.join(self._own)
        self._own = _Stored()

    def barrier(self) -> None:
        """All lanes of the program meet."""
        self._own.join(self._fresh)
        self._fresh = _Stored()

    def loaded(self, addresses: Addresses) -> None:
        """Lanes read these addresses."""
        if addresses.size == 0:
            return
        if self._fresh.holds(addresses):
            raise NumericsError("a kernel loads what it stored, without a barrier between")
        if self._others.holds(addresses):
            raise NumericsError("a kernel loads what another program of its grid stored")

    def stored(self, addresses: Addresses, values: Addresses) -> None:
        """Lanes write these values, one each, to these addresses."""
        if addresses.size == 0:
            return
        if self._fresh.holds(addresses):
            raise NumericsError("a kernel stores to one place twice, without a barrier between")
        if self._others.holds(addresses):
            raise NumericsError("two programs of a grid store to one place")
        if addresses.size > 1:
            order = np.argsort(addresses, kind="stable")
            same = addresses[order[1:]] == addresses[order[:-1]]
            if (same & (values[order[1:]] != values[order[:-1]])).any():
                raise NumericsError("two lanes store different values to one place")
        self._fresh.add(addresses)
