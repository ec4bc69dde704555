"""The vLLM connector on stubs of its base classes, driven as vLLM's scheduler drives it."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

import pytest

import deepinfer_kvtier as kvtier

torch = pytest.importorskip("torch", reason="the adapters' tests need torch: nox -s integrations")

sys.path.insert(0, str(Path(__file__).parent / "stubs"))

import tiny_attention  # noqa: E402
import vllm_base as stubs  # noqa: E402

NUM_BLOCKS, BLOCK = 64, 16


class Server:
    """One vLLM as far as the connector sees it: a scheduler, `tp` workers, and a model each."""

    def __init__(self, module, path, *, tp=1, **extra) -> None:
        self.models = [tiny_attention.TinyAttention(NUM_BLOCKS, BLOCK) for _ in range(tp)]
        layers = dict.fromkeys(tiny_attention.LAYERS, self.models[0].page_bytes)
        kv = stubs.kv_cache_config(layers, num_blocks=NUM_BLOCKS, block_size=BLOCK)

        def connector(role, rank):
            config = stubs.vllm_config(str(path), tp=tp, rank=rank, **extra)
            return module.KVTierConnector(config, role, kv)

        self.scheduler = connector(stubs.KVConnectorRole.SCHEDULER, 0)
        self.workers = [connector(stubs.KVConnectorRole.WORKER, rank) for rank in range(tp)]
        for worker, model in zip(self.workers, self.models, strict=True):
            worker.register_kv_caches(model.caches)
        self._next_block = 1

    def request(self, name, tokens, **fields) -> stubs.Request:
        return stubs.Request(name, list(tokens), len(tokens), **fields)

    def blocks(self, count) -> list[int]:
        taken = list(range(self._next_block, self._next_block + count))
        self._next_block += count
        return taken

    def prefill(self, request, *, chunk=None, local=0, local_blocks=(), damage=None):
        """(output rows computed here, external tokens, failed blocks) of a whole prompt."""
        n = len(request.all_token_ids)
        first = self.scheduler.get_num_new_matched_tokens(request, local)
        external, is_async = self.scheduler.get_num_new_matched_tokens(request, local)
        assert (external, is_async) == (first[0], False), "asking twice changed something"
        ids = [*local_blocks, *self.blocks(-(-n // BLOCK) - len(local_blocks))]
        self.scheduler.update_state_after_alloc(request, None, external)
        rows, failed = [], set()
        at = local + external
        new, blocks_left = True, (ids,)
        while at < n:
            size = min(chunk or n, n - at)
            cached = stubs.CachedRequestData()
            fresh = []
            if new:
                fresh = [stubs.NewRequestData(request.request_id, blocks_left, at)]
            else:
                cached = stubs.CachedRequestData([request.request_id], set(), [None], [at])
            output = stubs.SchedulerOutput(fresh, cached, {request.request_id: size})
            meta = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
            if damage is not None and new:
                damage()
            for worker, model in zip(self.workers, self.models, strict=True):
                worker.bind_connector_metadata(meta)
                worker.start_load_kv(None)
                for name in tiny_attention.LAYERS:
                    worker.wait_for_layer_load(name)
                failed |= worker.get_block_ids_with_load_errors()
                if not failed:
                    computed = model.run(request.all_token_ids, ids, at, at + size)
                for name in tiny_attention.LAYERS:
                    worker.save_kv_layer(name, model.caches[name], None)
                worker.wait_for_save()
                worker.clear_connector_metadata()
            if failed:
                return None, external, failed
            rows.append(computed)
            at += size
            new = False
        assert self.scheduler.request_finished(request, ids) == (False, None)
        for worker in self.workers:  # written behind the step; the next one here comes at once
            assert worker._scopes.cache.flush().done
        return torch.cat(rows), external, failed

    def close(self) -> None:
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()


@pytest.fixture
def module(monkeypatch):
    stubs.install(monkeypatch)
    return importlib.import_module("deepinfer_kvtier.integrations.vllm")


@pytest.fixture
def start(module, tmp_path):
    servers = []

    def launch(path=tmp_path / "kv", **keywords):
        servers.append(Server(module, path, **keywords))
        return servers[-1]

    yield launch
    for server in servers:
        server.close()


def tokens(seed, count):
    return torch.randint(0, 1000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("chunk", [None, 100])
def test_a_prompt_from_the_cache_gives_the_same_output_bit_for_bit(start, chunk):
    prompt = tokens(1, 300)
    first = start()
    cold, external, _ = first.prefill(first.request("a", prompt), chunk=chunk)
    assert external == 0
    first.close()
    second = start()
    warm, external, failed = second.prefill(second.request("b", prompt), chunk=chunk)
    assert (external, failed) == (256, set())
    assert torch.equal(warm, cold[256:])
    assert second.scheduler._scopes.cache.host.capacity_bytes == 0, "it only looks"


def test_a_local_prefix_is_left_alone_and_only_the_rest_is_loaded(start):
    prompt = tokens(2, 300)
    first = start()
    cold, _, _ = first.prefill(first.request("a", prompt))
    first.close()
    server = start()
    local = server.blocks(3)
    (model,) = server.models
    model.run(prompt, local, 0, 48)
    before = [cache[:, local].clone() for cache in model.caches.values()]
    warm, external, _ = server.prefill(server.request("b", prompt), local=48, local_blocks=local)
    assert external == 256 - 48
    assert torch.equal(warm, cold[256:])
    after = [cache[:, local] for cache in model.caches.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_blocks_that_vllm_shares_with_others_are_not_written(start):
    prompt = tokens(14, 300)
    first = start()
    first.prefill(first.request("a", prompt))
    first.close()
    server = start()
    local = server.blocks(3)
    (model,) = server.models
    for cache in model.caches.values():
        cache[:, local] = 7.0  # not what the cache holds, so that a write would show
    _, external, _ = server.prefill(server.request("b", prompt), local=48, local_blocks=local)
    assert external == 256 - 48
    assert all((cache[:, local] == 7.0).all() for cache in model.caches.values())


def test_a_block_that_is_gone_between_match_and_load_is_reported_as_failed(start):
    prompt = tokens(3, 300)
    first = start()
    cold, _, _ = first.prefill(first.request("a", prompt))
    first.close()
    server = start()
    scope = server.scheduler._scopes
    ns = scope.namespace(server_scope(), 0)
    hasher = ns.hasher()
    hasher.extend(prompt)

    def damage():
        ns.drop(hasher.digests[1:])
        for worker in server.workers:
            worker._scopes.cache.gc()

    _, external, failed = server.prefill(server.request("b", prompt), damage=damage)
    assert external == 256
    assert failed == set(range(1 + 8, 1 + 16)), "the second cache block is vLLM's blocks 9 to 16"
    # vLLM goes on with what is left, and the recomputed block is saved again.
    (worker,), (model,) = server.workers, server.models
    ids = list(range(1, 20))
    again = stubs.CachedRequestData(["b"], set(), [None], [128])
    meta = server.scheduler.build_connector_meta(stubs.SchedulerOutput([], again, {"b": 300 - 128}))
    worker.bind_connector_metadata(meta)
    worker.start_load_kv(None)
    rest = model.run(prompt, ids, 128, 300)
    worker.wait_for_save()
    assert torch.equal(rest[128:], cold[256:])
    assert worker._scopes.cache.flush().done
    assert server.scheduler.get_num_new_matched_tokens(server.request("c", prompt), 0)[0] == 256


def test_what_was_promised_is_not_collected_before_the_workers_have_loaded_it(start, tmp_path, cli):
    prompt = tokens(15, 300)
    first = start()
    cold, _, _ = first.prefill(first.request("a", prompt))
    first.close()
    evicted = []

    def collect():
        report = cli.facts("gc", tmp_path / "kv", "--quota-bytes", "4096", "--yes")
        evicted.append(report["segments_evicted"])

    server = start()
    warm, external, failed = server.prefill(server.request("b", prompt), damage=collect)
    assert (external, failed, evicted) == (256, set(), [0])
    assert torch.equal(warm, cold[256:])


def test_a_request_that_ends_before_it_was_scheduled_gives_its_lease_back(start):
    server = start()
    prompt = tokens(16, 300)
    server.prefill(server.request("a", prompt))
    cache = server.scheduler._scopes.cache
    request = server.request("b", prompt)
    assert server.scheduler.get_num_new_matched_tokens(request, 0)[0] == 256
    assert server.scheduler.get_num_new_matched_tokens(request, 0)[0] == 256
    assert len(cache.leases) == 1
    server.scheduler.request_finished(request, [])
    assert len(cache.leases) == 0


def test_leases_of_loads_are_given_back_some_steps_later(start):
    server = start()
    prompt = tokens(17, 300)
    server.prefill(server.request("a", prompt))
    server.prefill(server.request("b", prompt))
    for _ in range(8):
        idle = stubs.SchedulerOutput([], stubs.CachedRequestData(), {})
        server.scheduler.build_connector_meta(idle)
    assert len(server.scheduler._scopes.cache.leases) == 0


def server_scope(salt="", adapter=None):
    from deepinfer_kvtier.integrations.vllm_config import Scope

    return Scope(salt, adapter)


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "tenant-b"},
        {"lora_request": stubs.Lora("style", "/adapters/style")},
        {"mm_features": [stubs.Feature("hash-2", stubs.Range(10, 20))]},
        {"mm_features": [stubs.Feature("hash-1", stubs.Range(11, 20))]},
        {"mm_features": [stubs.Feature("hash-1", stubs.Range(10, 20), "video")]},
    ],
)
def test_another_tenant_adapter_or_picture_finds_nothing(start, other):
    server = start()
    prompt = tokens(4, 300)
    same = {
        "cache_salt": "tenant-a",
        "mm_features": [stubs.Feature("hash-1", stubs.Range(10, 20))],
    }
    server.prefill(server.request("a", prompt, **same))
    _, external, _ = server.prefill(server.request("b", prompt, **same))
    assert external == 256
    _, external, _ = server.prefill(server.request("c", prompt, **{**same, **other}))
    assert external == 0


def test_blocks_of_another_attention_backend_are_not_taken_for_ours(start):
    prompt = tokens(4, 300)
    first = start(attention="FLASH_ATTN")
    first.prefill(first.request("a", prompt))
    first.close()
    for backend, found in (("FLASH_ATTN", 256), ("ROCM_ATTN", 0)):
        server = start(attention=backend)
        assert server.prefill(server.request("b", prompt))[1] == found


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": object()},
        {"mm_features": [stubs.Feature("", stubs.Range(0, 5))]},
    ],
)
def test_what_has_no_safe_identity_is_neither_found_nor_stored(start, fields):
    server = start()
    for name in "ab":
        request = server.request(name, tokens(5, 300), **fields)
        assert server.prefill(request)[1] == 0
    stats = server.workers[0]._scopes.cache.stats()
    assert "put_records" not in stats["puts"]


def test_tensor_parallel_ranks_store_their_own_bytes_and_all_are_needed(start):
    prompt = tokens(6, 300)
    first = start(tp=2)
    cold, _, _ = first.prefill(first.request("a", prompt))
    first.close()
    server = start(tp=2)
    warm, external, _ = server.prefill(server.request("b", prompt))
    assert external == 256
    assert torch.equal(warm, cold[256:])
    ns = server.scheduler._scopes.namespace(server_scope(), 1)
    hasher = ns.hasher()
    hasher.extend(prompt)
    ns.drop(hasher.digests[1:])
    assert server.scheduler.get_num_new_matched_tokens(server.request("c", prompt), 0)[0] == 128


def test_replicated_latents_are_stored_once(start):
    server = start(tp=2, mla=True)
    prompt = tokens(7, 300)
    server.prefill(server.request("a", prompt))
    puts = [worker._scopes.cache.stats()["puts"].get("put_records", 0) for worker in server.workers]
    assert puts == [2, 0]
    server.scheduler._scopes.cache.gc()
    _, external, failed = server.prefill(server.request("b", prompt))
    assert (external, failed) == (256, set())


def test_drafts_are_not_stored_before_they_are_accepted(start):
    server = start()
    prompt = tokens(8, 120)
    request = server.request("a", prompt)
    connector, (worker,) = server.scheduler, server.workers
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    ids = server.blocks(10)

    def step(computed, scheduled, *, new=False):
        fresh = [stubs.NewRequestData("a", (ids,), computed)] if new else []
        cached = stubs.CachedRequestData()
        if not new:
            cached = stubs.CachedRequestData(["a"], set(), [None], [computed])
        output = stubs.SchedulerOutput(fresh, cached, {"a": scheduled})
        meta = connector.build_connector_meta(output)
        worker.bind_connector_metadata(meta)
        worker.wait_for_save()
        return sum(len(save.digests[0]) for save in meta.saves)

    assert step(0, 120, new=True) == 0
    request.all_token_ids.append(5)
    assert step(120, 9) == 0, "eight of these nine tokens are drafts"
    request.all_token_ids.extend(tokens(9, 8))
    request.num_output_placeholders = 2
    assert step(129, 1) == 0, "two of the computed tokens are not known to be final yet"
    request.num_output_placeholders = 0
    assert step(129, 1) == 1


def test_a_resumed_request_loads_into_its_new_blocks(start):
    prompt = tokens(10, 300)
    server = start()
    cold, _, _ = server.prefill(server.request("a", prompt))
    request = server.request("b", prompt)
    old, fresh = server.blocks(19), server.blocks(19)
    connector, (worker,), (model,) = server.scheduler, server.workers, server.models
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, None, 256)
    started = stubs.NewRequestData("b", (old,), 256)
    empty = stubs.CachedRequestData()
    connector.build_connector_meta(stubs.SchedulerOutput([started], empty, {"b": 10}))
    external, _ = connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, None, external)
    resumed = stubs.CachedRequestData(["b"], {"b"}, [(fresh,)], [external])
    meta = connector.build_connector_meta(stubs.SchedulerOutput([], resumed, {"b": 44}))
    worker.bind_connector_metadata(meta)
    worker.start_load_kv(None)
    assert torch.equal(model.run(prompt, fresh, 256, 300), cold[256:])


def test_tools_make_a_request_agent_traffic_and_the_class_reaches_the_records(start, module):
    params = module.transfer_params({"tools": [{"type": "function"}], "messages": []})
    assert params == {"kvtier_class": "agent"}
    spoken = {"messages": [{"role": "user", "content": "hi"}]}
    assert module.transfer_params(spoken) == {"kvtier_class": "chat"}
    answered = {"messages": [{"role": "tool", "content": "42"}]}
    assert module.transfer_params(answered) == {"kvtier_class": "agent"}
    server = start()
    server.prefill(server.request("a", tokens(11, 300), kv_transfer_params=params))
    server.prefill(server.request("b", tokens(12, 300)))
    worker = server.workers[0]._scopes.cache
    worker.flush()
    names = {path.name.split("-")[1] for path in worker.config.path.rglob("seg-*.kvs")}
    assert names == {"agent", "chat"}


def test_saves_are_told_to_routers_once(start):
    server = start()
    prompt = tokens(13, 300)
    server.prefill(server.request("a", prompt, lora_request=stubs.Lora("style", "/adapters/style")))
    (event,) = server.scheduler.take_events()
    assert (event.block_size, event.medium, event.lora_name) == (128, "kvtier", "style")
    assert event.token_ids == prompt[:256]
    assert (len(event.block_hashes), event.parent_block_hash) == (2, None)
    assert list(server.scheduler.take_events()) == []


def _attend(kv, spec) -> None:
    kv.kv_cache_groups[0].kv_cache_spec = spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, k: c.kv_transfer_config.kv_connector_extra_config.clear(), "kvtier: Field"),
        (
            lambda c, k: c.kv_transfer_config.kv_connector_extra_config["kvtier"].clear(),
            "kvtier.path",
        ),
        (lambda c, k: setattr(c.parallel_config, "pipeline_parallel_size", 2), "pipeline"),
        (lambda c, k: k.kv_cache_groups.append(k.kv_cache_groups[0]), "one KV cache group"),
        # Blocks hold other tokens than their place says: each rank has every n-th.
        (lambda c, k: setattr(c.parallel_config, "decode_context_parallel_size", 2), "decode_con"),
        (lambda c, k: setattr(c.parallel_config, "prefill_context_parallel_size", 2), "prefill_c"),
        (lambda c, k: _attend(k, stubs.SlidingWindowSpec()), "SlidingWindowSpec for layer"),
        (
            lambda c, k: _attend(
                k,
                stubs.namespace(block_size=16, kv_cache_specs={"layer": stubs.SlidingWindowSpec()}),
            ),
            "SlidingWindowSpec for layer",
        ),
    ],
)
def test_a_setup_it_cannot_serve_is_one_clear_error(module, tmp_path, change, message):
    config = stubs.vllm_config(str(tmp_path / "kv"))
    kv = stubs.kv_cache_config({"layer": 64}, num_blocks=4)
    change(config, kv)
    with pytest.raises(kvtier.ConfigError, match=message):
        module.KVTierConnector(config, stubs.KVConnectorRole.WORKER, kv)


@pytest.mark.parametrize("uniform", [False, True])
def test_latents_are_a_kind_of_full_attention(module, tmp_path, uniform):
    config = stubs.vllm_config(str(tmp_path / "kv"), mla=True)
    kv = stubs.kv_cache_config({"layer": 64}, num_blocks=4)
    spec = stubs.MLAAttentionSpec(block_size=16, page_size_bytes=64)
    _attend(kv, stubs.namespace(block_size=16, kv_cache_specs={"layer": spec}) if uniform else spec)
    connector = module.KVTierConnector(config, stubs.KVConnectorRole.WORKER, kv)
    connector.register_kv_caches({"layer": torch.zeros((4, 64), dtype=torch.uint8)})
    connector.shutdown()


def test_pages_of_another_size_are_refused(start):
    server = start()
    (worker,), (model,) = server.workers, server.models
    wrong = {name: cache[:, :10] for name, cache in model.caches.items()}
    with pytest.raises(kvtier.ConfigError, match="expected 64 pages"):
        worker.register_kv_caches(wrong)
    with pytest.raises(kvtier.ConfigError, match="no KV cache for layer"):
        worker.register_kv_caches({})
