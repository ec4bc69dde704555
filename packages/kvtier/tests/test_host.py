from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kvtier.base.buffers import checksum_of
from deepinfer_kvtier.host.eviction import Use
from deepinfer_kvtier.host.memory import HostRecord, HostTier
from deepinfer_kvtier.host.policies import ONLINE
from deepinfer_kvtier.testing import ManualClock

SIZE = 100


def tier(
    records: int = 4,
    state_share: float = 0.5,
    clock: ManualClock | None = None,
    policy: str = "tail-lru",
) -> HostTier:
    return HostTier(
        records * SIZE,
        state_share=state_share,
        state_ttl_s=180,
        clock=clock or ManualClock(),
        policy=ONLINE[policy](),
    )


def touch(host: HostTier, *numbers: int, at_s: float = 0.0) -> None:
    chain = [digest(number) for number in numbers]
    host.used(Use(chain, len(chain), 128 * len(chain), 128, at_s))


def digest(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def take(host, kind, size):
    """Room for one record, or None."""
    return next(iter(host.take_many(kind, size, 1)), None)


def store(host: HostTier, number: int, kind: int = 0, size: int = SIZE) -> HostRecord | None:
    data = take(host, kind, size)
    if data is None:
        return None
    data[:] = number
    (record,) = host.publish_all([HostRecord(kind, digest(number), bytes(32), 1, data, 0)])
    host.unpin([record])
    return record


def there(host: HostTier, *numbers: int, kind: int = 0) -> list[bool]:
    return [host.contains(kind, digest(number)) for number in numbers]


def test_the_least_recently_used_record_goes_first():
    host = tier()
    for number in range(4):
        store(host, number)
    touch(host, 0)
    store(host, 4)
    assert there(host, 0, 1, 2, 3, 4) == [True, False, True, True, True]


def test_a_touched_chain_loses_its_tail_before_its_head():
    host = tier()
    for number in range(4):
        store(host, number)
    touch(host, 0, 1, 2, 3)
    store(host, 4)
    assert there(host, 0, 1, 2, 3) == [True, True, True, False]


def test_a_pinned_record_is_never_a_victim():
    host = tier()
    for number in range(4):
        store(host, number)
    pinned = [host.pin(0, digest(number)) for number in range(4)]
    assert store(host, 4) is None
    host.unpin(pinned[2:3])
    assert store(host, 4) is not None
    assert there(host, 0, 1, 2, 3, 4) == [True, True, False, True, True]
    assert all((record.data == number).all() for number, record in enumerate(pinned) if number != 2)


def test_state_slots_stay_in_their_share():
    host = tier(records=8, state_share=0.25)
    for number in range(5):
        store(host, number, kind=1)
    assert there(host, 0, 1, 2, 3, 4, kind=1) == [False, False, False, True, True]


def test_a_single_state_slot_larger_than_its_share_is_kept():
    host = tier(records=8, state_share=0.1)
    assert store(host, 1, kind=1, size=3 * SIZE) is not None
    assert store(host, 2, kind=1, size=3 * SIZE) is not None
    assert there(host, 1, 2, kind=1) == [False, True]


def test_what_is_larger_than_everything_is_refused():
    assert take(tier(), 0, 5 * SIZE) is None


@pytest.mark.parametrize("policy", ONLINE)
def test_a_policy_hears_of_what_was_removed(policy):
    host = tier(policy=policy)
    for number in range(4):
        store(host, number)
    host.remove(0, digest(0))
    for number in range(4, 8):
        store(host, number)
    assert there(host, *range(8)) == [False] * 4 + [True] * 4
    assert host.usage()["policy_failures"] == 0


def test_removing_a_pinned_record_leaves_its_bytes_to_the_holder():
    host = tier()
    store(host, 1)
    held = host.pin(0, digest(1))
    host.remove(0, digest(1))
    for number in range(2, 6):
        store(host, number)
    assert (held.data == 1).all()


def test_publishing_twice_keeps_the_first():
    host = tier()
    first = store(host, 1)
    data = take(host, 0, SIZE)
    (again,) = host.publish_all([HostRecord(0, digest(1), bytes(32), 1, data, 0)])
    assert again is first
    host.audit()


def test_sampled_verification_finds_a_record_that_changed_in_memory():
    host = tier()
    record = store(host, 1)
    record.checksum = checksum_of([record.data.data])
    assert not any(host.damaged([record]) for _ in range(200))
    record.data[5] ^= 1
    assert any(host.damaged([record]) for _ in range(64))
    assert host.usage()["corrupt"] == 1


@pytest.mark.parametrize("policy", ONLINE)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "pin", "unpin", "remove", "touch", "expire", "later"]),
            st.integers(0, 7),
            st.integers(0, 1),
            st.sampled_from([50, 100, 130]),
        ),
        max_size=60,
    )
)
def test_books_balance_and_bytes_stay_right_whatever_happens(policy, operations):
    clock = ManualClock()
    host = tier(records=5, clock=clock, policy=policy)
    held: list[tuple[HostRecord, int]] = []
    for name, number, kind, size in operations:
        if name == "store":
            store(host, number, kind, size)
        elif name == "pin":
            record = host.pin(kind, digest(number))
            if record is not None:
                held.append((record, number))
        elif name == "unpin" and held:
            host.unpin([held.pop()[0]])
        elif name == "remove":
            host.remove(kind, digest(number))
        elif name == "touch":
            if kind:
                host.used_state(digest(number))
            else:
                touch(host, number, at_s=clock.monotonic())
        elif name == "expire":
            host.expire()
        else:
            clock.advance(100)
        host.audit()
        for record, content in held:
            assert (record.data == content).all(), "a pinned record was overwritten"
    host.unpin([record for record, _ in held])
    assert host.pins() == 0
    assert host.usage()["policy_failures"] == 0


@pytest.mark.parametrize("capacity", [0, 50])
def test_a_tier_without_room_refuses_everything(capacity):
    host = HostTier(
        capacity, state_share=0.1, state_ttl_s=1, clock=ManualClock(), policy=ONLINE["lru"]()
    )
    assert take(host, 0, SIZE) is None
    assert take(host, 1, SIZE) is None
    assert isinstance(take(host, 0, 0), np.ndarray)
