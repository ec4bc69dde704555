"""The operators of deepinfer_kernels that the model calls.

They are resolved when a model is built, from the registry as it is then: a decode step of a small
model calls hundreds of them on tiny tensors, where the checks and the dispatch of the public
functions would cost more than the arithmetic.
"""

from __future__ import annotations

from typing import Any

from torch.nn.functional import linear

from deepinfer_engine.errors import ConfigError
from deepinfer_kernels import batch_invariant as fixed
from deepinfer_kernels import formats, registry
from deepinfer_kernels.ep import Exchange, GlooExchange, ep_combine, ep_dispatch
from deepinfer_kernels.errors import BackendError, ExchangeError

__all__ = [
    "Exchange",
    "ExchangeError",
    "GlooExchange",
    "Operators",
    "ep_combine",
    "ep_dispatch",
    "formats",
    "registry",
]


class Operators:
    """Resolved callables; arguments as the functions of the same names in `deepinfer_kernels.ops`.

    Positional arguments only, and all of them.
    """

    def __init__(self, device: str, *, batch_invariant: bool = False) -> None:
        """batch_invariant: forms that give a row the same bits whatever rows are beside it, and
        `linear` with them. Raises ConfigError, naming the operator, where one has no such form."""

        def resolved(name: str) -> Any:
            if not batch_invariant:
                return registry.resolve(name, device)
            try:
                return fixed.resolve(name, device)
            except BackendError as error:
                raise ConfigError(f"batch_invariant: {error}") from error

        self.linear: Any = resolved("linear") if batch_invariant else linear
        """`torch.nn.functional.linear`, or the same in one order of sums."""
        self.rms_norm = resolved("rms_norm")
        self.rope = resolved("rope")
        self.mhc_pre_norm = resolved("mhc_pre_norm")
        self.mhc_collapse = resolved("mhc_collapse")
        self.mhc_post = resolved("mhc_post")
        self.mhc_post_pre_norm = resolved("mhc_post_pre_norm")
        self.norm_rope_quant = resolved("norm_rope_quant")
        self.mla_query_key = resolved("mla_query_key")
        self.mla_sparse = resolved("mla_sparse")
        self.mla_decode_sparse = resolved("mla_decode_sparse")
        self.mla_output = resolved("mla_output")
        self.index_topk = resolved("index_topk")
        self.compress_pool = resolved("compress_pool")
        self.fake_quant = resolved("fake_quant")
        self.kv_store = resolved("kv_store")
        self.kv_load = resolved("kv_load")
        self.engram_hash = resolved("engram_hash")
        self.engram_gate = resolved("engram_gate")
        self.moe_layer = resolved("moe_layer")
        self.moe_gate = resolved("moe_gate")
        self.moe_experts = resolved("moe_experts")
        self.swiglu = resolved("swiglu")
        self.add_rms_norm = resolved("add_rms_norm")
        self.quant_linear = resolved("quant_linear")
        self.silu_mul = resolved("silu_mul")
        self.qkv_rope_store = resolved("qkv_rope_store")
        self.gqa_attention = resolved("gqa_attention")
