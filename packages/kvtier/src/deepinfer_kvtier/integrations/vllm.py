"""`KVTierConnector` for vLLM's `KVConnectorBase_V1`.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_module_path": "deepinfer_kvtier.integrations.vllm",
  "kv_connector_extra_config": {"kvtier": {"path": "/var/cache/kv"}}}'

Blocks are loaded before a step and saved at its end, whole and synchronously with the step; the
cache writes them to the directory behind it. Works with one KV cache group and tensor parallelism.
"""

# vLLM is not installed where this package is checked: its classes are unknown there.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from deepinfer_kvtier.integrations.vllm_config import (
    Scopes,
    read_geometry,
    read_settings,
    transfer_params,
)
from deepinfer_kvtier.integrations.vllm_scheduler import SchedulerSide, Transfer
from deepinfer_kvtier.integrations.vllm_worker import WorkerSide

__all__ = ["KVTierConnector", "KVTierMetadata", "transfer_params"]


@dataclass
class KVTierMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers of one step."""

    loads: list[Transfer] = field(default_factory=list[Transfer])
    saves: list[Transfer] = field(default_factory=list[Transfer])


class KVTierConnector(KVConnectorBase_V1):
    """One instance in the scheduler, one in each worker; they meet in the cache directory.

    raises: ConfigError for a setup this connector cannot serve.
    """

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = read_settings(vllm_config)
        geometry = read_geometry(vllm_config, kv_cache_config, settings)
        self._block_tokens = geometry.block_tokens
        only_looks = role is KVConnectorRole.SCHEDULER
        self._scopes = Scopes(vllm_config, geometry, settings, only_looks=only_looks)
        self._scheduler = SchedulerSide(self._scopes, geometry, settings)
        self._worker = WorkerSide(self._scopes, geometry)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a future miss, nothing more."""
        return False

    # -- scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVTierMetadata(*self._scheduler.step(scheduler_output))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        """BlockStored for what workers were told to save; medium "kvtier"."""
        from vllm.distributed.kv_events import BlockStored

        for blocks in self._scheduler.take_stored():
            yield BlockStored(
                block_hashes=list(blocks.digests),
                parent_block_hash=blocks.parent,
                token_ids=list(blocks.token_ids),
                block_size=self._block_tokens,
                lora_id=None,
                medium="kvtier",
                lora_name=blocks.adapter,
            )

    # -- worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.load(self._metadata().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """`start_load_kv` has loaded all layers: a cache block holds them together."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """All layers are saved in `wait_for_save`: a cache block holds them together."""

    def wait_for_save(self) -> None:
        self._worker.save(self._metadata().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.taken_failures()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """No save is in flight between steps, so no block is overwritten too early."""

    def shutdown(self) -> None:
        self._scopes.cache.close()

    def _metadata(self) -> KVTierMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVTierMetadata)
        return metadata
