"""The SGLang storage on stubs of its base class, driven as HiCache drives it."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

import pytest

import deepinfer_kvtier as kvtier

torch = pytest.importorskip("torch", reason="the adapters' tests need torch: nox -s integrations")

sys.path.insert(0, str(Path(__file__).parent / "stubs"))

import sglang_base as stubs  # noqa: E402
import tiny_attention  # noqa: E402

PAGE = 16


@pytest.fixture
def module(monkeypatch):
    stubs.install(monkeypatch)
    return importlib.import_module("deepinfer_kvtier.integrations.sglang")


@pytest.fixture
def make(module, tmp_path):
    opened = []

    def build(**changes):
        config = stubs.storage_config(str(tmp_path / "kv"), **changes)
        # As SGLang does it: names from the configuration, the class called with (config, kwargs).
        loaded = importlib.import_module(config.extra_config["module_path"])
        storage = getattr(loaded, config.extra_config["class_name"])(config, {})
        opened.append(storage)
        return storage

    yield build
    for storage in opened:
        storage.close()


def page_keys(tokens) -> list[str]:
    """Chained hashes of whole pages, as SGLang names them."""
    keys, last = [], b""
    for at in range(0, len(tokens) // PAGE * PAGE, PAGE):
        last = hashlib.sha256(last + bytes(str(tokens[at : at + PAGE]), "ascii")).digest()
        keys.append(last.hex())
    return keys


def pool(seed=None, slots=256, width=8, dtype=torch.bfloat16):
    made = stubs.HostPool(slots, PAGE, width, dtype)
    if seed is not None:
        made.data.copy_(torch.randn(slots, width, generator=torch.Generator().manual_seed(seed)))
    return made


def at(first_page, count):
    return torch.arange(first_page * PAGE, (first_page + count) * PAGE)


KEYS = page_keys(list(range(10 * PAGE)))


def test_pages_come_back_into_other_slots_as_they_were(make):
    storage = make()
    source = pool(1)
    storage.register_mem_pool_host(source)
    assert storage.batch_set_v1(KEYS[:6], at(2, 6)) == [True] * 6
    assert storage.batch_exists(KEYS) == 6
    target = pool()
    storage.register_mem_pool_host(target)
    assert storage.batch_get_v1(KEYS[:8], at(5, 8)) == [True] * 6 + [False] * 2
    assert torch.equal(target.data[5 * PAGE : 11 * PAGE], source.data[2 * PAGE : 8 * PAGE])
    assert not target.data[11 * PAGE :].any()


def test_a_missing_page_in_the_middle_hides_only_itself(make):
    storage = make()
    source = pool(10)
    storage.register_mem_pool_host(source)
    for page in (0, 1, 3):
        assert storage.batch_set_v1(KEYS[page : page + 1], at(page, 1)) == [True]
    target = pool()
    storage.register_mem_pool_host(target)
    assert storage.batch_get_v1(KEYS[:4], at(0, 4)) == [True, True, False, True]
    assert torch.equal(target.data[3 * PAGE : 4 * PAGE], source.data[3 * PAGE : 4 * PAGE])


def test_pages_survive_into_the_next_server(make):
    first = make()
    first.register_mem_pool_host(pool(2))
    first.batch_set_v1(KEYS[:4], at(0, 4), stubs.HiCacheStorageExtraInfo(prefix_keys=[]))
    more = stubs.HiCacheStorageExtraInfo(prefix_keys=KEYS[:4])
    first.batch_set_v1(KEYS[4:6], at(4, 2), more)
    first.close()
    second = make()
    second.register_mem_pool_host(pool())
    assert second.batch_exists(KEYS) == 6
    assert second.exists(KEYS[5])
    assert not second.exists(KEYS[6])


def test_another_rank_model_pool_size_or_salt_finds_nothing(make):
    storage = make(tp_size=2)
    storage.register_mem_pool_host(pool(3))
    storage.batch_set_v1(KEYS[:2], at(0, 2))
    assert storage._cache.flush().done
    same = make(tp_size=2)
    same.register_mem_pool_host(pool())
    assert same.batch_exists(KEYS[:2]) == 2
    others = [
        (make(tp_size=2, tp_rank=1), pool()),
        (make(tp_size=2, model_name="large"), pool()),
        (make(tp_size=2, extra={"salt": "other"}), pool()),
        (make(tp_size=2), pool(width=16)),
    ]
    for other, its_pool in others:
        other.register_mem_pool_host(its_pool)
        assert other.batch_exists(KEYS[:2]) == 0


@pytest.mark.parametrize("change", ["layout", "stored type", "true type"])
def test_pages_of_another_arrangement_are_not_taken_for_ours(make, change):
    storage, source = make(), pool(seed=1)
    storage.register_mem_pool_host(source)
    assert all(storage.batch_set_v1(KEYS[:4], at(0, 4)))
    other = pool(dtype=torch.float16 if change == "stored type" else torch.bfloat16)
    if change == "layout":
        other.layout = "page_first"
    if change == "true type":
        other.device_pool.dtype = torch.float8_e5m2
    second = make()
    second.register_mem_pool_host(other)
    assert second.batch_exists(KEYS[:4]) == 0
    assert second.batch_get_v1(KEYS[:4], at(0, 4)) == [False] * 4


def test_ranks_of_a_latent_model_share_their_pages(make):
    storage = make(tp_size=2, is_mla_model=True)
    storage.register_mem_pool_host(pool(4))
    storage.batch_set_v1(KEYS[:2], at(0, 2))
    assert storage._cache.flush().done
    other = make(tp_size=2, tp_rank=1, is_mla_model=True)
    other.register_mem_pool_host(pool())
    assert other.batch_exists(KEYS[:2]) == 2


def test_hit_policies_of_further_pools_shorten_the_prefix(make):
    storage = make()
    storage.register_mem_pool_host(pool(5))
    storage.register_mem_host_pool_v2(pool(6, width=4), stubs.PoolName.INDEXER)
    storage.register_mem_host_pool_v2(pool(7, width=2), stubs.PoolName.SWA)
    kv, index, swa = stubs.PoolName.KV, stubs.PoolName.INDEXER, stubs.PoolName.SWA
    stored = storage.batch_set_v2(
        [
            stubs.PoolTransfer(kv, at(0, 8), KEYS[:8]),
            stubs.PoolTransfer(index, at(0, 7), KEYS[:7]),
            stubs.PoolTransfer(swa, at(0, 2), KEYS[4:6]),
        ]
    )
    assert stored == {kv: [True] * 8, index: [True] * 7, swa: [True] * 2}
    all_pages = stubs.PoolTransfer(index, keys=KEYS)
    trailing = stubs.PoolTransfer(swa, keys=KEYS[:2], hit_policy=stubs.PoolHitPolicy.TRAILING_PAGES)
    found = storage.batch_exists_v2(KEYS, [all_pages, trailing])
    assert found.kv_hit_pages == 6
    assert found.extra_pool_hit_pages == {kv: 8, index: 7, swa: 6}
    assert storage.batch_exists_v2(KEYS, [all_pages]).kv_hit_pages == 7
    assert storage.batch_exists_v2(KEYS).kv_hit_pages == 8
    got = storage.batch_get_v2(
        [stubs.PoolTransfer(swa, at(8, 3), KEYS[4:7]), stubs.PoolTransfer(kv, at(8, 1), KEYS[:1])]
    )
    assert got == {swa: [True, True, False], kv: [True]}


def test_single_tensors_of_any_shape_and_type(make):
    storage = make()
    value = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    assert storage.set("k1", value)
    assert storage.batch_set(["k2", "k3"], [value + 1, value + 2])
    target = torch.zeros(4, 3, 2).permute(2, 1, 0)  # not contiguous
    assert storage.get("k1", target) is target
    assert torch.equal(target, value)
    found = storage.batch_get(["k2", "absent", "k3"], [torch.zeros_like(value) for _ in range(3)])
    assert torch.equal(found[0], value + 1)
    assert found[1] is None
    assert torch.equal(found[2], value + 2)
    assert storage.get("k1") is None, "there is no room to load into"


def test_slots_that_do_not_fit_the_keys_are_refused_not_guessed(make, caplog):
    storage = make()
    storage.register_mem_pool_host(pool(8))
    assert storage.batch_set_v1(KEYS[:2], at(0, 1)) == [False, False]
    assert storage.batch_get_v1(KEYS[:2], None) == [False, False]
    assert storage.batch_get_v2([stubs.PoolTransfer(stubs.PoolName.SWA, at(0, 1), KEYS[:1])]) == {
        stubs.PoolName.SWA: [False]
    }
    assert "cannot write 2 pages" in caplog.text


def test_the_scheduler_with_metrics_on_is_not_stopped_by_ours(make):
    stubs.log_storage_metrics(make())


def test_a_cleared_storage_finds_nothing(make):
    storage = make()
    storage.register_mem_pool_host(pool(9))
    storage.batch_set_v1(KEYS[:2], at(0, 2))
    assert storage.clear()
    assert storage.batch_exists(KEYS[:2]) == 0
    assert storage.batch_set_v1(KEYS[:2], at(0, 2)) == [True, True]
    assert storage.batch_exists(KEYS[:2]) == 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"kvtier": None}, "kvtier"), ({"traffic_class": "vip"}, "traffic_class must be one of")],
)
def test_a_wrong_configuration_is_one_clear_error(make, extra, message):
    with pytest.raises(kvtier.ConfigError, match=message):
        make(extra=extra)


def test_a_prompt_through_the_storage_gives_the_same_output_bit_for_bit(make):
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, 1000, (150,), generator=generator).tolist()
    keys = page_keys(prompt)
    blocks = list(range(1, 11))
    model = tiny_attention.TinyAttention(32, PAGE)
    cold = model.run(prompt, blocks, 0, 150)
    storage = make()
    host = PagedHost(model)
    storage.register_mem_pool_host(host)
    indices = torch.cat([torch.arange(b * PAGE, (b + 1) * PAGE) for b in blocks[: len(keys)]])
    assert all(storage.batch_set_v1(keys, indices))
    storage.close()

    fresh = tiny_attention.TinyAttention(32, PAGE)
    again = make()
    again.register_mem_pool_host(PagedHost(fresh))
    pages = again.batch_exists(keys)
    assert pages == len(keys) == 9
    elsewhere = [b + 15 for b in blocks]
    indices = torch.cat([torch.arange(b * PAGE, (b + 1) * PAGE) for b in elsewhere[:pages]])
    assert all(again.batch_get_v1(keys, indices))
    warm = fresh.run(prompt, elsewhere, pages * PAGE, 150)
    assert torch.equal(warm, cold[pages * PAGE :])


class PagedHost:
    """The tiny model's pages as a host pool: a page is all layers' keys and values of a block."""

    page_size = PAGE

    def __init__(self, model) -> None:
        self._caches = list(model.caches.values())

    def get_dummy_flat_data_page(self):
        return self.get_data_page(0)

    def get_data_page(self, index, flat=True):
        return torch.stack([cache[:, index // PAGE] for cache in self._caches]).flatten()

    def set_from_flat_data_page(self, index, data_page):
        shape = (len(self._caches), *self._caches[0][:, 0].shape)
        for cache, page in zip(self._caches, data_page.reshape(shape), strict=True):
            cache[:, index // PAGE] = page
