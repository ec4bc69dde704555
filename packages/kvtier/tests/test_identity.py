from __future__ import annotations

import hashlib
import itertools
import struct

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.identity import chain_root, fingerprint

SECRET = bytes(range(32))
ROOT = bytes(32)
LAYOUT = kvtier.LayoutSpec(4, {"block": kvtier.parts(("kv", 100))})


def hasher(root: bytes = ROOT, block_tokens: int = 4) -> kvtier.ChainHasher:
    return kvtier.ChainHasher(SECRET, root, block_tokens)


def plain_chain(tokens: list[int], media: list[kvtier.MediaItem], size: int) -> list[bytes]:
    """The definition, written token by token."""
    previous, digests = ROOT, []
    for start in range(0, len(tokens) - size + 1, size):
        body = previous
        for token in tokens[start : start + size]:
            body += struct.pack("<I", token)
        for item in sorted(media, key=lambda m: m.start):
            slots = [s for s in range(start, start + size) if 0 <= s - item.start < item.length]
            if slots:
                offset = item.item_offset + slots[0] - item.start
                body += struct.pack("<BHHI", item.kind, slots[0] - start, len(slots), offset)
                body += item.digest
        previous = blake3(body, key=SECRET).digest()
        digests.append(previous)
    return digests


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.lists(st.integers(0, 40), max_size=5),
    st.integers(1, 7),
)
def test_hashing_in_pieces_equals_the_definition(tokens, cuts, size):
    incremental = hasher(block_tokens=size)
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    new = []
    for a, b in itertools.pairwise(edges):
        new += incremental.extend(tokens[a:b])
    assert list(incremental.digests) == new == plain_chain(tokens, [], size)
    assert incremental.n_tokens == len(tokens)


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 3), st.integers(0, 9)),
        max_size=4,
    ),
    st.integers(0, 32),
)
def test_media_enter_every_block_they_overlap(spans, cut):
    media = [
        kvtier.MediaItem(start, length, hashlib.sha256(bytes([i])).digest(), kind, offset)
        for i, (start, length, kind, offset) in enumerate(spans)
    ]
    tokens = [7] * 32
    whole = hasher()
    whole.extend(tokens, media)
    assert list(whole.digests) == plain_chain(tokens, media, 4)
    pieces = hasher()
    pieces.extend(tokens[:cut], [m for m in media if m.start < cut])
    pieces.extend(tokens[cut:], [m for m in media if m.start >= cut])
    assert pieces.digests == whole.digests


def test_two_tiles_of_one_image_are_different():
    digest = bytes(range(32))
    digests = set()
    for offset in (0, 4):
        one = hasher()
        one.extend([9] * 4, [kvtier.MediaItem(0, 4, digest, item_offset=offset)])
        digests.add(one.digests)
    assert len(digests) == 2


def test_a_fork_continues_by_itself():
    trunk = hasher()
    trunk.extend([1, 2, 3, 4, 5])
    branch = trunk.fork()
    trunk.extend([6, 7, 8])
    branch.extend([6, 7, 9])
    assert trunk.digests[0] == branch.digests[0]
    assert trunk.digests[1] != branch.digests[1]
    assert list(trunk.digests) == plain_chain([1, 2, 3, 4, 5, 6, 7, 8], [], 4)


@pytest.mark.parametrize("digest", [None, b"", bytes(16), bytes(33)])
def test_media_without_a_whole_digest_are_uncacheable(digest):
    with pytest.raises(kvtier.UncacheableInput, match="32-byte"):
        hasher().extend([1] * 8, [kvtier.MediaItem(2, 3, digest)])


def test_media_that_come_too_late_are_refused():
    late = hasher()
    late.extend([1] * 6)
    with pytest.raises(kvtier.ConfigError, match="token 4"):
        late.extend([1] * 6, [kvtier.MediaItem(3, 2, bytes(32))])


@pytest.mark.parametrize(
    "tokens",
    [[-1], [2**32], np.array([-2], dtype=np.int64), [1.5], [[1, 2], [3, 4]], ["a"], [2**70]],
)
def test_token_ids_outside_32_bits_are_refused(tokens):
    with pytest.raises(kvtier.ConfigError):
        hasher().extend(tokens)


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i8", "u2", "i4"])
def test_the_type_of_the_token_array_does_not_matter(dtype):
    typed = hasher()
    typed.extend(np.arange(9).astype(dtype))
    assert list(typed.digests) == plain_chain(list(range(9)), [], 4)


def test_the_order_of_mapping_keys_is_no_difference_and_values_are():
    def print_(**changes):
        base = {"model": {"id": "m", "config": "ab"}, "layout": LAYOUT}
        return fingerprint(**{**base, **changes})

    same = print_(model={"config": "ab", "id": "m"})
    assert same == print_()
    others = [
        print_(model={"id": "m", "config": "ac"}),
        print_(adapters=[{"digest": "x", "scale": 0.5}]),
        print_(quantisation={"main": "fp4"}),
        print_(rope={"factor": 4}),
        print_(numerics="torch-cpu"),
        print_(shard=kvtier.Shard(0, 2, "heads")),
        print_(shard=kvtier.Shard(1, 2, "heads")),
        print_(tables={"ngram": "d1"}),
        print_(layout=kvtier.LayoutSpec(8, LAYOUT.kinds)),
    ]
    assert len({same, *others}) == len(others) + 1


def test_identities_are_stable_between_releases():
    """A change here empties every cache in the field: raise the identity version instead."""
    print_ = fingerprint(model="m", layout=LAYOUT)
    root = chain_root(SECRET, print_, b"tenant")
    chain = kvtier.ChainHasher(SECRET, root, 4)
    chain.extend([1, 2, 3, 4], [kvtier.MediaItem(1, 2, bytes(range(32)), kind=1)])
    assert print_.hex() == "95d93721daea3509f6ee09449dd65e4db9af8ecb364e464a6c9e61f0f3b59f90"
    assert root.hex() == "24e204cc8a719acac2570efa153a8abe66d2d22157412bc9d83b9ff0eecf82e9"
    assert (
        chain.digests[0].hex() == "7fb4942718f563fb8b4e94dc1c36b9f354916eea2f1a8663eee76814fbe875a5"
    )


def test_salt_and_fingerprint_cannot_run_into_each_other():
    assert chain_root(SECRET, bytes(32), b"ab") != chain_root(SECRET, bytes(32), b"abc")
    with pytest.raises(kvtier.ConfigError, match="32 bytes"):
        chain_root(b"short", bytes(32), b"")


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_an_identity_that_is_not_json_is_refused(value):
    with pytest.raises(kvtier.ConfigError, match="JSON"):
        fingerprint(model={"id": value}, layout=LAYOUT)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({}, "block"),
        ({"state": ()}, "block"),
        ({"block": (), "window": ()}, "unknown kind"),
        ({"block": (kvtier.Part("a", 1, 5),)}, "byte 0"),
        ({"block": (kvtier.Part("a", 0, 5), kvtier.Part("b", 6, 5))}, "byte 5"),
        ({"block": (kvtier.Part("a", 0, -5),)}, "size"),
        ({"block": kvtier.parts(*((str(i), 1) for i in range(17)))}, "at most 16"),
        ({"block": kvtier.parts(("a", 2**30 + 1))}, "at most"),
    ],
)
def test_impossible_layouts_are_refused(kinds, message):
    with pytest.raises(kvtier.ConfigError, match=message):
        kvtier.LayoutSpec(128, kinds)


@pytest.mark.parametrize("block_tokens", [0, -1, 65_536])
def test_impossible_block_sizes_are_refused(block_tokens):
    with pytest.raises(kvtier.ConfigError, match="block_tokens"):
        kvtier.LayoutSpec(block_tokens, LAYOUT.kinds)


def test_impossible_shards_are_refused():
    with pytest.raises(kvtier.ConfigError, match="index 2 of 2"):
        kvtier.Shard(2, 2)
