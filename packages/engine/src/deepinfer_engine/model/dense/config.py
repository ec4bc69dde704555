"""config.json of the dense decoders: Llama and SmolLM2, Qwen2, Qwen3, Mistral without a window."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deepinfer_engine.core.pictures import PictureRules
from deepinfer_engine.model.eos import EosIds
from deepinfer_engine.model.rotary import RopeKind, RopeScaling

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
)
Architecture = Literal[
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"
]
Size = Annotated[int, Field(gt=0, le=1 << 24)]


class DenseConfig(BaseModel):
    """Keys as in the released files; other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    architectures: tuple[Architecture]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: int = Field(gt=0, le=1024)
    num_attention_heads: int = Field(gt=0, le=4096)
    num_key_value_heads: int = Field(0, ge=0, le=4096)
    """0, or absent: as many as query heads."""
    head_dim: int = Field(0, ge=0, le=4096)
    """0, or absent: hidden_size / num_attention_heads."""
    max_position_embeddings: int = Field(gt=1, le=1 << 27)
    rms_norm_eps: float = Field(1e-6, ge=0, lt=1)
    hidden_act: Literal["silu"] = "silu"
    rope_theta: float = Field(10000.0, gt=0, lt=1e15)
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool | None = None
    mlp_bias: bool = False
    use_sliding_window: bool = True
    sliding_window: int | None = Field(None, gt=0)
    bos_token_id: int | None = Field(None, ge=0)
    eos_token_id: EosIds = ()

    @model_validator(mode="before")
    @classmethod
    def _normal(cls, raw: Any) -> Any:
        """Newer files hold base and scaling together in `rope_parameters`; null means absent."""
        if not isinstance(raw, dict):
            return raw
        out = {key: value for key, value in raw.items() if value is not None}
        rope = out.pop("rope_parameters", None)
        if isinstance(rope, dict):
            if "rope_theta" in rope:
                out["rope_theta"] = rope["rope_theta"]
            out["rope_scaling"] = rope
        scaling = out.get("rope_scaling")
        if isinstance(scaling, dict):
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            out["rope_scaling"] = {**scaling, "rope_type": kind}
        return out

    @model_validator(mode="after")
    def _check(self) -> DenseConfig:
        heads, kv = self.num_attention_heads, self.kv_heads
        if heads % kv:
            raise ValueError(
                f"num_key_value_heads ({kv}) must divide num_attention_heads ({heads})"
            )
        if not self.head_dim and self.hidden_size % heads:
            raise ValueError(
                f"num_attention_heads ({heads}) must divide hidden_size ({self.hidden_size}), or "
                "head_dim must be given"
            )
        if self.head_width % 2:
            raise ValueError(f"head_dim must be even, got {self.head_width}")
        windowed = self.architecture == "MistralForCausalLM" or (
            self.architecture == "Qwen2ForCausalLM" and self.use_sliding_window
        )
        window = self.sliding_window
        if windowed and window is not None and window < self.max_position_embeddings:
            raise ValueError(
                f"sliding_window is {window}, below max_position_embeddings "
                f"({self.max_position_embeddings}): windowed attention is not built; lower "
                "max_position_embeddings to the window to run the model within it"
            )
        wrong = next((t for t in self.eos_token_id if t >= self.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"eos_token_id {wrong} is outside the vocabulary of {self.vocab_size} tokens"
            )
        return self

    @property
    def architecture(self) -> str:
        return self.architectures[0]

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def qkv_bias(self) -> bool:
        """Qwen2 has it always; elsewhere the file says so."""
        return self.architecture == "Qwen2ForCausalLM" or bool(self.attention_bias)

    @property
    def output_bias(self) -> bool:
        return self.architecture != "Qwen2ForCausalLM" and bool(self.attention_bias)

    @property
    def qk_norm(self) -> bool:
        """RMSNorm over each head of q and k, before the rotation."""
        return self.architecture == "Qwen3ForCausalLM"

    @property
    def rope_kind(self) -> RopeKind:
        return "default" if self.rope_scaling is None else self.rope_scaling.rope_type

    @property
    def max_model_len(self) -> int:
        return self.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.eos_token_id

    @property
    def picture_rules(self) -> PictureRules | None:
        return None
