from __future__ import annotations

import numpy as np
import pytest

from deepinfer_kvtier.flow.tier import register


class Pinning:
    def __init__(self, fails: bool = False) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.fails = fails

    def register_memory(self, address: int, length: int) -> None:
        if self.fails:
            raise OSError(12, "no room for another region")
        self.ranges.append((address, length))

    def unregister_memory(self, address: int, length: int) -> None:
        self.ranges.remove((address, length))


def test_memory_is_registered_with_the_tiers_that_pin_it_until_closed():
    tier, buffer = Pinning(), np.zeros(100, np.uint16)
    with register(buffer, [object(), tier]) as registration:
        assert tier.ranges == [(buffer.ctypes.data, 200)]
        assert (registration.address, registration.length) == tier.ranges[0]
    assert tier.ranges == []
    registration.close()


def test_a_tier_that_cannot_pin_leaves_no_other_one_registered():
    tier = Pinning()
    with pytest.raises(OSError, match="no room"):
        register(bytearray(10), [tier, Pinning(fails=True)])
    assert tier.ranges == []
