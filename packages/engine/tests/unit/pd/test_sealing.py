"""One sealed frame: opened as it was, where it was, or not at all."""

from __future__ import annotations

import pytest

from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd.sealing import Cipher, KeyAgreement
from deepinfer_engine.pd.wire import TAG_BYTES

KEY, HEADER, BODY = bytes(range(32)), b"sixteen bytes hd", b"what was said"


def sealed(seq=3, header=HEADER):
    return Cipher(KEY).seal(seq, header, [BODY[:4], BODY[4:]])


def opened(body, cipher=None, seq=3, header=HEADER, piece=5):
    """What a frame held, by both ways, which must agree."""
    cipher = cipher or Cipher(KEY)
    try:
        whole = bytes(cipher.open(seq, header, body))
    except TransferError:
        with pytest.raises(TransferError, match="not what the peer sealed"):
            in_pieces(cipher, seq, header, body, piece)
        raise
    assert in_pieces(cipher, seq, header, body, piece) == whole
    return whole


def in_pieces(cipher, seq, header, body, piece):
    target = memoryview(bytearray(max(0, len(body) - TAG_BYTES)))
    opening = cipher.opening(seq, header, memoryview(body))
    for at in range(0, len(target), piece):
        opening.read(target[at : at + piece])
    opening.end()
    return bytes(target)


@pytest.mark.parametrize("parts", [[BODY], [BODY[:4], BODY[4:]], [b"", BODY], [b""]])
def test_a_frame_sealed_into_memory_is_the_same_frame(parts):
    target = memoryview(bytearray(sum(map(len, parts)) + TAG_BYTES))
    Cipher(KEY).seal_into(3, HEADER, parts, target)
    assert bytes(target) == Cipher(KEY).seal(3, HEADER, parts)


def test_a_frame_is_opened_where_it_was_sealed():
    assert opened(sealed()) == BODY
    assert opened(Cipher(KEY).seal(3, HEADER, [b""])) == b""
    assert BODY not in sealed()
    assert sealed(3) != sealed(4)


@pytest.mark.parametrize("at", range(len(BODY) + 16))
def test_a_changed_byte_is_never_opened(at):
    body = bytearray(sealed())
    body[at] ^= 1
    with pytest.raises(TransferError, match="not what the peer sealed"):
        opened(bytes(body))


@pytest.mark.parametrize(
    ("key", "seq", "header", "body"),
    [
        (KEY, 4, HEADER, sealed()),
        (KEY, 3, b"another header..", sealed()),
        (bytes(32), 3, HEADER, sealed()),
        (KEY, 3, HEADER, sealed()[:-1]),
        (KEY, 3, HEADER, b""),
        (KEY, 3, HEADER, BODY + bytes(16)),
    ],
    ids=["again, as the next", "header", "key", "cut", "empty", "in clear"],
)
def test_a_frame_at_another_place_is_not_opened(key, seq, header, body):
    with pytest.raises(TransferError, match="not what the peer sealed"):
        opened(body, Cipher(key), seq, header)


def hello(agreement):
    return b"hello of " + agreement.public


def test_keys_differ_by_direction_connection_cluster_key_and_every_byte_of_both_hellos():
    def keys(accepting, connecting, mine, theirs, public=None):
        there, back = accepting.ciphers(public or connecting.public, mine, theirs)
        return there.seal(0, HEADER, [BODY]), back.seal(0, HEADER, [BODY])

    one, other = KeyAgreement(KEY), KeyAgreement(KEY)
    mine, theirs = hello(one), hello(other)
    there, back = keys(one, other, mine, theirs)
    assert there != back
    assert keys(other, one, mine, theirs) == (there, back), "both sides have the same keys"
    for changed in (
        keys(one, other, mine + b"x", theirs),
        keys(one, other, mine, theirs + b"x"),
        keys(one, other, mine[:-1], mine[-1:] + theirs),
        keys(one, KeyAgreement(KEY), mine, theirs),
        keys(KeyAgreement(bytes(32)), other, mine, theirs),
    ):
        assert there not in changed
        assert back not in changed


def test_a_public_key_that_is_none_is_refused():
    with pytest.raises(TransferError, match="unusable"):
        KeyAgreement(KEY).ciphers(bytes(32), b"a", b"b")
