"""What every prefix store promises; both of ours against one list of claims."""

from __future__ import annotations

import pytest
from toy_engine import BLOCK, patient, prompt, toy

from deepinfer_engine.adapters.kvtier import open_store
from deepinfer_engine.core.pictures import Picture, picture_digest
from deepinfer_engine.core.prefix_store import BorderState
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.kv.memory import MemoryStore

LAYOUT = toy().layout
TOKENS = prompt(1, 4 * BLOCK)


def block(i: int) -> bytes:
    return bytes([i + 1]) * LAYOUT.block_bytes


def state(position: int) -> bytes:
    return bytes([position]) * LAYOUT.state_bytes


def put(store, first, n, borders, *, tokens=TOKENS, salt="s", pictures=()):
    findable = store.put(
        tokens,
        salt,
        first,
        [memoryview(block(i)) for i in range(first, first + n)],
        [BorderState(p, memoryview(state(p))) for p in borders],
        "chat",
        pictures,
    )
    findable()


def load(store, hit):
    blocks = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(hit.n_tokens // BLOCK)]
    slot = memoryview(bytearray(LAYOUT.state_bytes))
    good = store.load(hit, blocks, slot)
    store.release(hit)
    assert good.state
    return good.n_tokens, [bytes(b) for b in blocks], bytes(slot)


@pytest.fixture(params=["memory", "kvtier"])
def store(request, tmp_path):
    made = (
        MemoryStore(LAYOUT) if request.param == "memory" else open_store(patient(tmp_path), LAYOUT)
    )
    yield made
    made.close()


def picture(start, length, content):
    return Picture(start, length, 14, 14, picture_digest(14, 14, content), b"")


def test_an_empty_store_has_nothing(store):
    assert store.match(TOKENS, "s") is None


def test_a_hit_brings_back_exactly_what_was_put(store):
    put(store, 0, 4, [2 * BLOCK, 4 * BLOCK])
    hit = store.match([*TOKENS, 5], "s")
    assert (hit.n_tokens, sum(hit.blocks_by_tier.values())) == (4 * BLOCK, 4)
    assert load(store, hit) == (4 * BLOCK, [block(i) for i in range(4)], state(4 * BLOCK))


def test_a_hit_ends_where_both_blocks_and_state_are(store):
    put(store, 0, 4, [2 * BLOCK])
    hit = store.match([*TOKENS, 5], "s")
    assert hit.n_tokens == 2 * BLOCK
    assert load(store, hit)[2] == state(2 * BLOCK)


def test_a_state_behind_a_missing_block_is_no_hit(store):
    put(store, 0, 1, [])
    put(store, 2, 2, [4 * BLOCK])
    hit = store.match([*TOKENS, 5], "s")
    assert hit is None or (hit.n_tokens, hit.window) == (0, "miss")


def test_the_last_token_is_always_left_to_compute(store):
    put(store, 0, 4, [3 * BLOCK, 4 * BLOCK])
    assert store.match(TOKENS, "s").n_tokens == 3 * BLOCK


def test_a_limit_shortens_the_hit_to_a_border_with_state(store):
    put(store, 0, 4, [BLOCK, 3 * BLOCK])
    assert store.match([*TOKENS, 5], "s", limit_tokens=3 * BLOCK - 1).n_tokens == BLOCK


def test_another_salt_never_matches(store):
    put(store, 0, 4, [4 * BLOCK])
    assert store.match([*TOKENS, 5], "t") is None


def test_another_token_ends_the_prefix(store):
    put(store, 0, 4, [2 * BLOCK, 4 * BLOCK])
    changed = [*TOKENS[: 3 * BLOCK], TOKENS[3 * BLOCK] ^ 1, *TOKENS[3 * BLOCK + 1 :], 5]
    assert store.match(changed, "s").n_tokens == 2 * BLOCK


def test_later_blocks_continue_a_chain_that_was_put_before(store):
    put(store, 0, 2, [2 * BLOCK], tokens=TOKENS[: 2 * BLOCK])
    put(store, 2, 2, [4 * BLOCK])
    assert store.match([*TOKENS, 5], "s").n_tokens == 4 * BLOCK


def test_stats_are_plain_numbers(store):
    put(store, 0, 1, [BLOCK])
    assert all(isinstance(value, int | float) for value in store.stats().values())


def test_memory_over_its_limit_forgets_the_oldest():
    store = MemoryStore(LAYOUT, limit_bytes=3 * (LAYOUT.block_bytes + LAYOUT.state_bytes))
    for seed in range(5):
        put(store, 0, 1, [BLOCK], tokens=prompt(seed, BLOCK))
    found = [store.match([*prompt(seed, BLOCK), 1], "s") is not None for seed in range(5)]
    assert found == [False, False, True, True, True]


def test_two_openers_of_one_directory_see_each_others_blocks(tmp_path):
    writer, reader = open_store(patient(tmp_path), LAYOUT), open_store(patient(tmp_path), LAYOUT)
    put(writer, 0, 4, [4 * BLOCK])
    hit = reader.match([*TOKENS, 5], "s")
    assert load(reader, hit) == (4 * BLOCK, [block(i) for i in range(4)], state(4 * BLOCK))
    writer.close()
    reader.close()


def test_another_layout_in_the_same_directory_never_matches(tmp_path):
    first = open_store(patient(tmp_path), LAYOUT)
    put(first, 0, 4, [4 * BLOCK])
    other = open_store(patient(tmp_path), toy(fingerprint="other weights").layout)
    assert other.match([*TOKENS, 5], "s") is None
    first.close()
    other.close()


def test_a_directory_that_cannot_be_used_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigError, match="file"):
        open_store(tmp_path / "file", LAYOUT)


def test_prompts_with_other_pictures_share_nothing_from_the_picture_on(store):
    inside_second = picture(BLOCK + 3, BLOCK, b"cat")
    put(store, 0, 4, [BLOCK, 2 * BLOCK, 4 * BLOCK], pictures=(inside_second,))
    asked = [*TOKENS, 5]
    same = store.match(asked, "s", pictures=(inside_second,))
    assert same.n_tokens == 4 * BLOCK
    store.release(same)
    dog = picture(BLOCK + 3, BLOCK, b"dog")
    moved = picture(BLOCK + 4, BLOCK, b"cat")
    for other in ((), (dog,), (moved,), (inside_second, picture(3 * BLOCK, 9, b"cat"))):
        hit = store.match(asked, "s", pictures=other)
        assert hit.n_tokens == (2 * BLOCK if len(other) == 2 else BLOCK)
        store.release(hit)


def test_a_picture_beyond_the_last_whole_block_changes_nothing_before_it(store):
    put(store, 0, 2, [2 * BLOCK])
    hit = store.match(TOKENS, "s", pictures=(picture(2 * BLOCK, 7, b"cat"),))
    assert hit.n_tokens == 2 * BLOCK
    store.release(hit)


@pytest.mark.parametrize("kind", ["memory", "kvtier"])
def test_a_hit_without_a_state_ends_behind_any_block(kind, tmp_path):
    layout = toy(window=0).layout
    store = MemoryStore(layout) if kind == "memory" else open_store(patient(tmp_path), layout)
    content = [bytes([i + 1]) * layout.block_bytes for i in range(3)]
    store.put(TOKENS, "s", 0, [memoryview(b) for b in content], [], "chat")()
    hit = store.match([*TOKENS[: 2 * BLOCK], 5], "s")
    assert hit.n_tokens == 2 * BLOCK
    blocks = [memoryview(bytearray(layout.block_bytes)) for _ in range(2)]
    assert store.load(hit, blocks, memoryview(bytearray())).n_tokens == 2 * BLOCK
    assert [bytes(b) for b in blocks] == content[:2]
    store.release(hit)
    store.close()
