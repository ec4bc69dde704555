"""What the vLLM connector takes from vLLM's configuration: geometry, identity, settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import deepinfer_kvtier as kvtier


class ConnectorSettings(BaseModel):
    """`kv_connector_extra_config` of vLLM's `--kv-transfer-config`.

    kvtier:       fields of `KVTierConfig`; `path` is needed, since scheduler and workers are
                  processes of their own and meet in the directory.
    block_tokens: tokens of one cache block, rounded up to whole vLLM blocks.
    salt:         scope of requests without a `cache_salt`; empty = one scope shared by all.
    default_class: retention class of requests that name none.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    kvtier: dict[str, Any]
    block_tokens: int = Field(default=128, ge=1, le=65_535)
    salt: str = ""
    default_class: str = "chat"


@dataclass(frozen=True, slots=True)
class Scope:
    """What beside the tokens decides a request's chain: tenant and adapter."""

    salt: str
    adapter: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one worker's KV cache; the same on every rank.

    pages:    bytes of one vLLM block in each layer, in layer order.
    per:      vLLM blocks in one cache block.
    shards:   ranks that hold different bytes; 1 where all ranks hold the same (MLA).
    writer_only: replicated bytes that rank 0 alone stores.
    """

    block_size: int
    layers: tuple[str, ...]
    pages: tuple[int, ...]
    per: int
    num_blocks: int
    rank: int
    shards: int
    writer_only: bool

    @property
    def block_tokens(self) -> int:
        """Tokens of one cache block."""
        return self.block_size * self.per

    @property
    def layout(self) -> kvtier.LayoutSpec:
        """One part: all layers' pages of a cache block, layer after layer."""
        size = self.per * sum(self.pages)
        return kvtier.LayoutSpec(self.block_tokens, {"block": kvtier.parts(("kv", size))})


def read_settings(vllm_config: Any) -> ConnectorSettings:
    """raises: ConfigError, naming the wrong field."""
    extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    try:
        settings = ConnectorSettings.model_validate(extra)
    except ValidationError as cause:
        first = cause.errors(include_input=False, include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise kvtier.ConfigError(f"kv_connector_extra_config.{name}: {first['msg']}") from cause
    if not settings.kvtier.get("path"):
        raise kvtier.ConfigError(
            "kv_connector_extra_config.kvtier.path: name a directory that the scheduler and all"
            " workers share"
        )
    return settings


def read_geometry(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> Geometry:
    """raises: ConfigError for what this connector cannot serve."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise kvtier.ConfigError(
            "the kvtier connector serves pipeline_parallel_size 1,"
            f" got {parallel.pipeline_parallel_size}"
        )
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (count := getattr(parallel, field, 1)) > 1:
            raise kvtier.ConfigError(f"the kvtier connector serves {field} 1, got {count}")
    if kv_cache_config is None:
        raise kvtier.ConfigError(
            "the kvtier connector needs a vLLM that passes kv_cache_config to its connectors"
        )
    groups = list(kv_cache_config.kv_cache_groups)
    if len(groups) != 1:
        raise kvtier.ConfigError(
            f"the kvtier connector serves one KV cache group, got {len(groups)}: pass"
            " --disable-hybrid-kv-cache-manager"
        )
    (group,) = groups
    spec = group.kv_cache_spec
    layers = tuple(group.layer_names)
    single: Mapping[str, Any] = getattr(spec, "kv_cache_specs", None) or {}
    for name in layers:
        _check_keeps_all_tokens(name, single.get(name, spec))
    pages = tuple(int(single.get(name, spec).page_size_bytes) for name in layers)
    block_size = int(spec.block_size)
    ranks = int(parallel.tensor_parallel_size)
    replicated = bool(getattr(vllm_config.model_config, "use_mla", False))
    return Geometry(
        block_size=block_size,
        layers=layers,
        pages=pages,
        per=-(-settings.block_tokens // block_size),
        num_blocks=int(kv_cache_config.num_blocks),
        rank=int(parallel.rank) % ranks,
        shards=1 if replicated else ranks,
        writer_only=replicated,
    )


def _check_keeps_all_tokens(layer: str, spec: Any) -> None:
    """Layers of windows, chunks or recurrent state free the blocks of early tokens.

    vLLM puts one empty block in their place, whose bytes must not be stored under a prompt's name.
    raises: ConfigError for every kind but full attention (MLA is one).
    """
    if not any(cls.__name__ == "FullAttentionSpec" for cls in type(spec).__mro__):
        raise kvtier.ConfigError(
            f"the kvtier connector serves full attention, got {type(spec).__name__} for {layer}"
        )


class Scopes:
    """Namespaces by scope and shard, over one open cache."""

    def __init__(
        self,
        vllm_config: Any,
        geometry: Geometry,
        settings: ConnectorSettings,
        *,
        only_looks: bool = False,
    ) -> None:
        # The scheduler loads nothing: memory for records would be wasted on it.
        changes: dict[str, Any] = {"host_bytes": 0} if only_looks else {}
        self.cache = kvtier.open(**{**settings.kvtier, **changes})
        self._geometry = geometry
        self._identity = _identity(vllm_config, geometry)
        self._namespaces: dict[tuple[Scope, int], kvtier.Namespace] = {}

    def namespace(self, scope: Scope, shard: int) -> kvtier.Namespace:
        """Cheap after the first call for a scope; the oldest of too many are forgotten."""
        found = self._namespaces.get((scope, shard))
        if found is None:
            if len(self._namespaces) >= 4096:
                del self._namespaces[next(iter(self._namespaces))]
            adapters = (
                [{"name": scope.adapter[0], "path": scope.adapter[1]}] if scope.adapter else []
            )
            found = self.cache.namespace(
                self._geometry.layout,
                model=self._identity,
                salt=scope.salt,
                adapters=adapters,
                shard=kvtier.Shard(shard, self._geometry.shards, "tp"),
            )
            self._namespaces[(scope, shard)] = found
        return found


def _identity(vllm_config: Any, geometry: Geometry) -> dict[str, Any]:
    model = vllm_config.model_config
    return {
        "engine": "vllm",
        "model": str(model.model),
        "revision": str(getattr(model, "revision", None)),
        "dtype": str(model.dtype),
        "weights": str(getattr(model, "quantization", None)),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        # Backends differ in how they arrange the bytes of a page that is as long in all of them.
        "attention": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "block_size": geometry.block_size,
        "layers": blake3("\n".join(geometry.layers).encode()).hexdigest(),
        "pages": list(geometry.pages),
    }


def scope_of(request: Any, settings: ConnectorSettings) -> Scope:
    """Tenant and adapter of a vLLM request."""
    lora = request.lora_request
    adapter = None if lora is None else (str(lora.lora_name), str(lora.lora_path))
    return Scope(request.cache_salt or settings.salt, adapter)


def media_of(request: Any) -> list[kvtier.MediaItem]:
    """Placeholder spans with a digest of their content's identifier.

    raises: UncacheableInput for prompt embeddings and for media without an identifier.
    """
    if getattr(request, "prompt_embeds", None) is not None:
        raise kvtier.UncacheableInput("a prompt given as embeddings has no token identity")
    items: list[kvtier.MediaItem] = []
    for feature in request.mm_features or ():
        where = feature.mm_position
        digest = None
        if feature.identifier:
            digest = blake3(f"{feature.modality}\0{feature.identifier}".encode()).digest()
        item = kvtier.MediaItem(int(where.offset), int(where.length), digest)
        item.checked_digest()
        items.append(item)
    return items


def class_of(request: Any, settings: ConnectorSettings, known: Mapping[str, Any]) -> str:
    """Retention class: `kv_transfer_params["kvtier_class"]`, else the default."""
    named = (request.kv_transfer_params or {}).get("kvtier_class")
    return named if isinstance(named, str) and named in known else settings.default_class


def transfer_params(body: Mapping[str, Any]) -> dict[str, str]:
    """`kv_transfer_params` for a chat completion body: class agent with tools or their results.

    vLLM's scheduler does not see tools; whoever forwards the request adds these.
    """
    results = any(message.get("role") == "tool" for message in body.get("messages", ()))
    tools = bool(body.get("tools"))
    return {"kvtier_class": kvtier.traffic_class(tools=tools, tool_results=results)}
