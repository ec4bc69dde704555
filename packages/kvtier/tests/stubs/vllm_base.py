"""The parts of vLLM's connector interface that the adapter touches, with the real signatures.

Our own words: names, arguments and what the scheduler promises, nothing of the implementation.
"""

from __future__ import annotations

import enum
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024 - as in vLLM
    pass


class KVConnectorBase_V1(ABC):  # noqa: N801 - as in vLLM
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._connector_metadata: KVConnectorMetadata | None = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    @property
    def requires_kv_delivery(self) -> bool:
        return True

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        return

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        return

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    @abstractmethod
    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def shutdown(self) -> None:
        return None

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]: ...

    @abstractmethod
    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata: ...

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def take_events(self) -> Iterable[Any]:
        return ()


@dataclass
class BlockStored:
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


# -- what the scheduler hands over


@dataclass
class Range:
    offset: int
    length: int


@dataclass
class Feature:
    identifier: str
    mm_position: Range
    modality: str = "image"


@dataclass
class Lora:
    lora_name: str
    lora_path: str
    lora_int_id: int = 1


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    cache_salt: str | None = None
    lora_request: Lora | None = None
    mm_features: list[Feature] = field(default_factory=list)
    prompt_embeds: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    num_output_placeholders: int = 0


@dataclass
class NewRequestData:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class CachedRequestData:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]


class namespace(types.SimpleNamespace):  # noqa: N801 - short for configurations
    """Attributes by name."""


class FullAttentionSpec(namespace):
    """Layers that keep the blocks of all tokens."""


class MLAAttentionSpec(FullAttentionSpec):
    """As in vLLM, a kind of full attention."""


class SlidingWindowSpec(namespace):
    """Layers whose blocks before the window are freed."""


def vllm_config(
    path: str,
    *,
    block_size: int = 16,
    tp: int = 1,
    rank: int = 0,
    mla: bool = False,
    attention: str | None = None,
    **extra: Any,
) -> namespace:
    return namespace(
        kv_transfer_config=namespace(
            kv_connector_extra_config={"kvtier": {"path": path, "commit_delay_s": 0.0}, **extra}
        ),
        parallel_config=namespace(pipeline_parallel_size=1, tensor_parallel_size=tp, rank=rank),
        model_config=namespace(
            model="tiny", revision=None, dtype="torch.float32", quantization=None, use_mla=mla
        ),
        cache_config=namespace(block_size=block_size, cache_dtype="auto"),
        attention_config=namespace(backend=attention),
    )


def kv_cache_config(layers: dict[str, int], *, num_blocks: int, block_size: int = 16) -> namespace:
    """One group; `layers` maps layer name to bytes of a page."""
    (page,) = set(layers.values())
    spec = FullAttentionSpec(block_size=block_size, page_size_bytes=page)
    group = namespace(layer_names=list(layers), kv_cache_spec=spec)
    return namespace(num_blocks=num_blocks, kv_cache_groups=[group])


def install(monkeypatch: Any) -> None:
    """Put the stubs where `import vllm...` finds them, for one test."""
    base = types.ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.base")
    base.KVConnectorBase_V1 = KVConnectorBase_V1
    base.KVConnectorMetadata = KVConnectorMetadata
    base.KVConnectorRole = KVConnectorRole
    events = types.ModuleType("vllm.distributed.kv_events")
    events.BlockStored = BlockStored
    for module in (base, events):
        parts = module.__name__.split(".")
        for i in range(1, len(parts)):
            name = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "deepinfer_kvtier.integrations.vllm", raising=False)
