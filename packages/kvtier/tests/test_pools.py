"""Blocks of a tensor as source and destination. Device tensors need a device: not covered here."""

from __future__ import annotations

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import payload_of

torch = pytest.importorskip("torch", reason="pools need torch: nox -s integrations")

PAYLOAD = 4_000
LAYOUT = kvtier.LayoutSpec(128, {"block": kvtier.parts(("a", 1_000), ("b", 3_000))})
PROMPT = list(range(5 * 128 + 1))
pytestmark = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
            ],
        ),
    ],
)


def pool_of(device, count=8, stride=4_096):
    return kvtier.DevicePool(torch.full((count, stride), 0xAA, dtype=torch.uint8, device=device))


def content(pool, slot):
    return pool.tensor[slot].cpu().numpy()


@pytest.mark.parametrize("numbers", [[1, 2, 3, 4, 5], [7, 0, 3, 1, 5]])
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
@pytest.mark.parametrize("parts", [None, ["b"]])
def test_blocks_go_from_pool_to_store_and_back(store, device, numbers, host_bytes, parts):
    first, second = pool_of(device), pool_of(device)
    with kvtier.open(store, host_bytes=host_bytes, part_sums=True) as cache:
        ns = cache.namespace(LAYOUT, model="pool")
        digests = ns.match(PROMPT).digests
        for slot, digest in zip(numbers, digests, strict=True):
            row = torch.from_numpy(payload_of(digest, PAYLOAD))
            first.tensor[slot, :PAYLOAD] = row.to(device)
        assert ns.put(digests, first.slots(numbers), durability="flushed").wait(60)
        with ns.match(PROMPT) as match:
            job = ns.load(match, dst=second.slots(numbers[::-1]), parts=parts)
            assert job.wait(60).ok
            assert all(job.ready(block) for block in range(5))
        for slot, digest in zip(numbers[::-1], digests, strict=True):
            assert np.array_equal(content(second, slot)[:PAYLOAD], payload_of(digest, PAYLOAD))
        untouched = set(range(8)) - set(numbers)
        assert all((content(second, slot) == 0xAA).all() for slot in untouched)
        assert all((content(second, slot)[PAYLOAD:] == 0xAA).all() for slot in range(8))


def test_slots_that_cannot_be_meant_are_refused(device):
    pool = pool_of(device)
    with pytest.raises(kvtier.BufferShapeError, match=r"slots 0..7, got 8"):
        pool.slots([0, 8])
    with pytest.raises(kvtier.BufferShapeError, match="twice"):
        pool.slots([1, 1])
    with pytest.raises(kvtier.BufferShapeError, match="uint8"):
        kvtier.DevicePool(torch.zeros((2, 8), device=device))
    with kvtier.open(host_bytes=1 << 20) as cache:
        ns = cache.namespace(LAYOUT, model="pool")
        digests = ns.match(PROMPT).digests
        with pytest.raises(kvtier.BufferShapeError, match="expected 5 slots of at least 4000"):
            ns.put(digests, pool_of(device, stride=3_999).slots(range(5)))
