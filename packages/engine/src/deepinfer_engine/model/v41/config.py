"""`config.json` of a V4.1 checkpoint: what it may say, and what follows from it.

Keys and defaults are those of the released checkpoint family; widths are free, so that tiny models
load with the same code. Everything that cannot work is refused here, by name, before any weight is
read.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deepinfer_engine.core.pictures import PictureRules
from deepinfer_engine.model.files import checked

MAX_EXPERTS = 1 << 16
"""A larger number in a config.json is a damaged file: names of tensors are listed for each."""

Record = Literal["fp8", "fp4", "index_fp4", "raw"]


class RopeScaling(BaseModel):
    """YaRN parameters of the layers that read compressed entries."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["yarn"] = "yarn"
    factor: float = Field(16.0, gt=0, lt=1e6)
    beta_fast: float = Field(32.0, gt=0, lt=1e6)
    beta_slow: float = Field(1.0, gt=0, lt=1e6)
    original_max_position_embeddings: int = Field(65536, gt=0)


class TextConfig(BaseModel):
    """`text_config`. Names follow the released file; `extra` keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", ignored_types=(cached_property,))

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = 1
    head_dim: int = Field(gt=0)
    qk_rope_head_dim: int = Field(gt=0)
    q_lora_rank: int = Field(gt=0)
    o_lora_rank: int = Field(gt=0)
    o_groups: int = Field(gt=0)
    moe_intermediate_size: int = Field(gt=0)
    n_routed_experts: int = Field(gt=0, le=MAX_EXPERTS)
    n_shared_experts: int = Field(1, gt=0)
    num_experts_per_tok: int = Field(gt=0)
    routed_scaling_factor: float = Field(1.5, gt=0, lt=1e6)
    scoring_func: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: Literal[True] = True
    hidden_act: Literal["silu"] = "silu"
    swiglu_limit: float = Field(10.0, gt=0, lt=1e9)
    rms_norm_eps: float = Field(1e-20, ge=0, lt=1)
    attention_bias: Literal[False] = False
    attention_dropout: float = Field(0.0, ge=0, le=0)
    tie_word_embeddings: Literal[False] = False
    max_position_embeddings: int = Field(gt=1, le=1 << 27)
    rope_theta: float = Field(10000.0, gt=1, lt=1e15)
    rope_scaling: RopeScaling | None = None
    compress_rope_theta: float = Field(160000.0, gt=1, lt=1e15)
    sliding_window: int = Field(128, gt=0)
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_k_source_layer_ids: tuple[int, ...] | None = None
    index_n_heads: int = Field(gt=0)
    index_head_dim: int = Field(gt=0)
    index_topk: int = Field(gt=0)
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = Field(2048, gt=0)
    candidate_block_size: int = 8
    use_fp4_sparse_kv: bool = True
    hc_mult: int = Field(4, gt=0)
    hc_sinkhorn_iters: int = Field(20, gt=0)
    hc_eps: float = Field(1e-6, ge=0, lt=1)
    hc_shifted: Literal[True] = True
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = Field(4, ge=2, le=16)
    engram_vocab_size: int = Field(16_000_000, gt=0, le=1 << 40)
    engram_n_heads: int = Field(8, gt=0, le=1024)
    engram_head_dim: int = Field(256, gt=0, le=1 << 16)
    engram_pad_token_id: int = Field(2, ge=0)
    engram_compressed_vocab_size: int = Field(0, ge=0)
    num_nextn_predict_layers: int = Field(0, ge=0)
    dspark_block_size: int = Field(5, gt=0, le=64)
    dspark_noise_token_id: int = Field(0, ge=0)
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = Field(256, gt=0, le=1 << 16)
    dspark_n_routed_experts: int = Field(128, gt=0, le=MAX_EXPERTS)
    dspark_num_experts_per_tok: int = Field(3, gt=0)
    dspark_target_attn_input: Literal[True] = True

    @model_validator(mode="after")
    def _check(self) -> TextConfig:
        layers, nextn = self.num_hidden_layers, self.num_nextn_predict_layers
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok} of {self.n_routed_experts} "
                "n_routed_experts"
            )
        if nextn and self.dspark_num_experts_per_tok > self.dspark_n_routed_experts:
            raise ValueError("dspark_num_experts_per_tok exceeds dspark_n_routed_experts")
        if self.num_key_value_heads != 1:
            raise ValueError("num_key_value_heads must be 1")
        if len(self.compress_ratios) != layers + nextn:
            raise ValueError(
                f"compress_ratios has {len(self.compress_ratios)} entries; num_hidden_layers + "
                f"num_nextn_predict_layers = {layers + nextn}"
            )
        if set(self.compress_ratios) - {0, 1, 2}:
            raise ValueError("compress_ratios may only hold 0, 1 and 2")
        if any(self.compress_ratios[layers:]):
            raise ValueError("draft layers must have compress ratio 0")
        if self.num_attention_heads % self.o_groups:
            raise ValueError("o_groups must divide num_attention_heads")
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.head_dim:
            raise ValueError("qk_rope_head_dim must be even and at most head_dim")
        if self.head_dim % 32 or self.index_head_dim % 32:
            raise ValueError(
                "head_dim and index_head_dim must be multiples of 32 (quantisation blocks)"
            )
        if self.qk_rope_head_dim > self.index_head_dim:
            raise ValueError("qk_rope_head_dim must be at most index_head_dim")
        self._check_sharing()
        if len(self.engram_layer_ids) != len(self.engram_num_embeddings):
            raise ValueError("engram_num_embeddings needs one entry for each of engram_layer_ids")
        if nextn and not self.dspark_target_layer_ids:
            raise ValueError("a draft module needs dspark_target_layer_ids")
        self._check_ids()
        return self

    def _check_ids(self) -> None:
        """Token and layer numbers that would only fail, or mislead, while tokens are made."""
        tokens = {"dspark_noise_token_id": self.dspark_noise_token_id}
        if self.engram_layer_ids:
            tokens["engram_pad_token_id"] = self.engram_pad_token_id
        for name, token in tokens.items():
            if token >= self.vocab_size:
                raise ValueError(
                    f"{name} {token} is outside the vocabulary of {self.vocab_size} tokens"
                )
        for name in (
            "dspark_target_layer_ids",
            "kv_source_layer_ids",
            "index_source_layer_ids",
            "engram_layer_ids",
        ):
            wrong = [i for i in getattr(self, name) if not 0 <= i < self.num_hidden_layers]
            if wrong:
                raise ValueError(
                    f"{name} names layer {wrong[0]}; this model has layers 0.."
                    f"{self.num_hidden_layers - 1}"
                )

    def _check_sharing(self) -> None:
        kv, index_k, topk = (
            set(self.kv_source_layer_ids),
            set(self.index_k_sources),
            set(self.index_source_layer_ids),
        )
        if kv != index_k:
            raise ValueError(
                "index_k_source_layer_ids must equal kv_source_layer_ids: this runtime projects "
                f"index keys where it compresses, got {sorted(index_k)} and {sorted(kv)}"
            )
        if not kv <= topk:
            raise ValueError("kv_source_layer_ids must be part of index_source_layer_ids")
        for layer in range(self.num_hidden_layers):
            ratio = self.compress_ratios[layer]
            for name, sources in (("kv", kv), ("index", topk)):
                source = max((s for s in sources if s <= layer), default=None)
                if ratio and source is None:
                    raise ValueError(
                        f"layer {layer} has ratio {ratio} but no {name} source at or before it"
                    )
                if ratio and source is not None and self.compress_ratios[source] != ratio:
                    raise ValueError(
                        f"layer {layer} (ratio {ratio}) would read {name} source {source}, whose "
                        f"ratio is {self.compress_ratios[source]}"
                    )
        if self.n_producers < self.num_hidden_layers and self.n_producers not in kv:
            raise ValueError(f"the first consumer layer {self.n_producers} must be a KV source")
        if self.candidate_source_layer_id is not None:
            if self.candidate_source_layer_id not in topk:
                raise ValueError("candidate_source_layer_id must be one of index_source_layer_ids")
            followers = {
                self.compress_ratios[layer]
                for layer in topk
                if layer >= self.candidate_source_layer_id
            }
            if len(followers) > 1:
                raise ValueError(
                    "index sources from candidate_source_layer_id on must share one compress "
                    f"ratio, got {sorted(followers)}"
                )
            if self.candidate_block_size not in (8, 16):
                raise ValueError("candidate_block_size must be 8 or 16")
            if self.candidate_topk_blocks * self.candidate_block_size < self.index_topk:
                raise ValueError(
                    "candidate_topk_blocks * candidate_block_size must be at least index_topk"
                )

    @property
    def index_k_sources(self) -> tuple[int, ...]:
        """Layers that own an index key cache; the KV sources unless the file says otherwise."""
        return self.index_k_source_layer_ids or self.kv_source_layer_ids

    @cached_property
    def n_producers(self) -> int:
        """Layers run for every prompt token; the rest (ratio 1) are consumers."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return next((i for i, r in enumerate(ratios) if r == 1), self.num_hidden_layers)

    @cached_property
    def total_layers(self) -> int:
        """Backbone plus draft layers."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @cached_property
    def lookback(self) -> int:
        """Tokens before a position that its Engram rows depend on."""
        return self.engram_max_ngram_size - 1 if self.engram_layer_ids else 0

    @cached_property
    def backtrack(self) -> int:
        """B: extra ring slots that keep a truncation of up to B - 1 tokens exact."""
        return self.dspark_block_size + 1 if self.num_nextn_predict_layers else 1

    @cached_property
    def ring_slots(self) -> int:
        """Rows of each sliding-window ring, W + B."""
        return self.sliding_window + self.backtrack


class QuantizationConfig(BaseModel):
    """The one quantised layout there is: FP8 matrices in 32 x 32 blocks, FP4 experts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    quant_method: Literal["fp8"]
    activation_scheme: Literal["dynamic"]
    weight_block_size: tuple[Literal[32], Literal[32]]
    scale_fmt: Literal["ue8m0"]
    expert_dtype: Literal["fp4"]


class VisionConfig(BaseModel):
    """`vision_config`: the tower that turns 14 x 14 pixel patches into token embeddings."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_hidden_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    patch_size: int = Field(14, gt=0)
    rope_theta: float = Field(10000.0, gt=1, lt=1e15)
    downsample_ratio: int = Field(3, gt=0)
    max_image_tokens: int = Field(1024, gt=4)
    min_pixels: int = Field(295936, ge=0)
    max_wh_ratio: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> VisionConfig:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads must divide hidden_size")
        if (self.hidden_size // self.num_attention_heads) % 4:
            raise ValueError("a vision head must have a multiple of 4 channels (2-D rotation)")
        return self


class ModelConfig(BaseModel):
    """The root of `config.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    architectures: tuple[Literal["DeepseekV41ForCausalLM"]]
    model_type: Literal["deepseek_v41"] = "deepseek_v41"
    dtype: Literal["bfloat16"] = "bfloat16"
    bos_token_id: int = Field(0, ge=0)
    eos_token_id: int = Field(1, ge=0)
    pad_token_id: int = Field(2, ge=0)
    image_token_id: int | None = None
    tokenizer_compatibility: Literal["release", "native"] = "release"
    quantization_config: QuantizationConfig | None = None
    text_config: TextConfig
    vision_config: VisionConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, name) >= self.text_config.vocab_size:
                raise ValueError(
                    f"{name} {getattr(self, name)} is outside the vocabulary of "
                    f"{self.text_config.vocab_size} tokens"
                )
        if self.quantization_config is not None:
            c = self.text_config
            for key in ("hidden_size", "moe_intermediate_size", "engram_head_dim"):
                if getattr(c, key) % 32:
                    raise ValueError(
                        f"text_config.{key} must be a multiple of 32 in a quantised checkpoint, "
                        f"got {getattr(c, key)}"
                    )
        if self.vision_config is not None:
            token, size = self.image_token_id, self.text_config.vocab_size
            if token is None or not 0 <= token < size:
                raise ValueError(
                    f"a model with vision_config needs image_token_id in 0 .. {size - 1}, got "
                    f"{token}"
                )
        return self

    @property
    def vocab_size(self) -> int:
        return self.text_config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.text_config.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (self.eos_token_id,)

    @property
    def picture_rules(self) -> PictureRules | None:
        """What prompts with pictures must be like; None for a model without a tower."""
        v = self.vision_config
        if v is None or self.image_token_id is None:
            return None
        return PictureRules(
            self.image_token_id,
            v.patch_size,
            v.downsample_ratio,
            v.max_image_tokens,
            v.min_pixels,
            v.max_wh_ratio,
            self.text_config.hidden_size,
        )


def load_config(model_dir: Path) -> ModelConfig:
    """`model_dir/config.json` of a V4.1 model. Raises CheckpointError."""
    return checked(model_dir, ModelConfig.model_validate)
