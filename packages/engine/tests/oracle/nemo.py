"""NVIDIA NeMo-Automodel's DeepSeek-V4.1 on CPU: its plain-torch back ends, its checkpoint reader.

Importing this module skips the importing test module, aloud, where NeMo is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip(
    "nemo_automodel", reason="NVIDIA NeMo-Automodel is not installed; run `nox -s oracle`"
)

from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41 import attention, dspark
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
from nemo_automodel.components.models.deepseek_v41.quantization import quantize_cache
from transformers import PreTrainedTokenizerFast

__all__ = ["Drafted", "backbone", "drafter", "logits", "quantize_cache", "rounding", "unrounded"]


def _backend(attention: str) -> BackendConfig:
    return BackendConfig(
        attn=attention,
        linear="torch",
        rms_norm="torch_fp32",
        rope_fusion=False,
        experts="torch",
        dispatcher="torch",
        gate_precision="float32",
    )


def _config(model_dir: Path, dtype: str, text: dict[str, Any]) -> DeepseekV41Config:
    written = json.loads((model_dir / "config.json").read_text())
    vision = written.get("vision_config") or {"num_hidden_layers": 0}  # its default has a tower
    config = DeepseekV41Config.from_pretrained(model_dir, vision_config=vision, dtype=dtype)
    config.text_config.dtype = dtype
    for key, value in text.items():
        assert hasattr(config.text_config, key), key
        setattr(config.text_config, key, value)
    return config


def _read(model: Any, model_dir: Path) -> Any:
    """Fill `model` through NeMo's own checkpoint reader: index, shards, FP8 and FP4 decoding."""
    settings = CheckpointingConfig(
        checkpoint_dir=str(model_dir / "unused"),
        model_cache_dir=str(model_dir),
        model_repo_id=str(model_dir),
    )
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))  # what the reader leaves out must show
    Checkpointer(settings, 0, 0, 0).load_model(model, str(model_dir), is_init_step=True)
    unread = [name for name, tensor in model.state_dict().items() if tensor.isnan().any()]
    assert not unread, f"NeMo's reader left {unread}"
    return model.eval().requires_grad_(False)


@lru_cache(maxsize=32)
def backbone(model_dir: Path, dtype: str = "float32", attn: str = "eager", **text: Any) -> Any:
    """NeMo's `DeepseekV41ForCausalLM` with the weights of `model_dir`; `text` overrides keys of its
    text_config that change no shape."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
    config = _config(model_dir, dtype, text)
    model = DeepseekV41ForCausalLM(config, backend=_backend(attn), tokenizer=tokenizer)
    return _read(model, model_dir)


@lru_cache(maxsize=32)
def drafter(model_dir: Path) -> Any:
    """NeMo's `DeepseekV41DSparkModel` with the `mtp.*` weights of `model_dir`."""
    config = _config(model_dir, "float32", {})
    config.text_config.quantization_config = getattr(config, "quantization_config", None)
    model = dspark.DeepseekV41DSparkModel(
        config.text_config, _backend("eager"), num_anchors=1, enable_confidence_head=True
    )
    return _read(model, model_dir)


@torch.no_grad()
def logits(model: Any, ids: np.ndarray, **pictures: Tensor) -> Tensor:
    """[n, vocab] of one sequence in one pass."""
    return model(torch.from_numpy(ids)[None], **pictures).logits[0]


@contextmanager
def rounding(replacement: Callable[..., Tensor] | None) -> Iterator[None]:
    """Within, NeMo's cache rounding is `replacement(values, format=, block_size=)`; None leaves it
    as it is."""
    chosen = quantize_cache if replacement is None else replacement
    attention.quantize_cache = dspark.quantize_cache = chosen
    try:
        yield
    finally:
        attention.quantize_cache = dspark.quantize_cache = quantize_cache


def unrounded(values: Tensor, **_: Any) -> Tensor:
    """The counterpart of `cache_quant="none"`."""
    return values


class Drafted:
    """NeMo's draft block after the tokens `ids`, decoded greedily.

    tokens int64 [b]; logits [b, vocab]; hidden [b, H], the state before the last norm; confidence
    [b], NeMo's own head on that state, and confidence_normed [b], the same on the normed one.
    """

    @torch.no_grad()
    def __init__(
        self, model: Any, draft: Any, ids: np.ndarray, anchor: int, **pictures: Tensor
    ) -> None:
        config, last = draft.config, draft.mtp[-1]
        features = _target_features(model, config.dspark_target_layer_ids, ids, pictures)
        block = torch.full((1, config.dspark_block_size), config.dspark_noise_token_id)
        block[0, 0] = anchor
        embedded = draft.embed_tokens(block)
        at, keep = torch.tensor([[len(ids)]]), torch.ones(1, 1, dtype=torch.bool)
        before: list[Tensor] = []
        hook = last.norm.register_forward_hook(lambda _, args, __: before.append(args[0][0]))
        out = dspark.DeepseekV41DSparkBackbone.forward(
            draft,
            embedded,
            features,
            position_ids=draft.build_position_ids(at, len(ids)),
            attention_mask=draft.build_attention_mask(at, keep, len(ids), embedded.dtype),
        )
        hook.remove()
        self.hidden, normed = before[0], out.normalized_hidden_states[0]
        base = draft.compute_logits(normed)
        previous = torch.tensor([anchor])
        tokens, rows, raw, trained = [], [], [], []
        for k in range(config.dspark_block_size):
            transition, state = last.markov_head(previous)
            rows.append(base[k] + transition[0])
            raw.append(last.confidence_head(self.hidden[k : k + 1], state))
            trained.append(last.confidence_head(normed[k : k + 1], state))
            previous = rows[-1].argmax()[None]
            tokens.append(previous)
        self.tokens = torch.cat(tokens)
        self.logits = torch.stack(rows)
        self.confidence = torch.cat(raw).sigmoid()
        self.confidence_normed = torch.cat(trained).sigmoid()


def _target_features(
    model: Any, layers: list[int], ids: np.ndarray, pictures: dict[str, Tensor]
) -> Tensor:
    """[1, n, layers * H]: mean over the streams entering the attention of each layer."""
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, args, __: seen.append(args[0].mean(2)))
        for module in model.get_dspark_target_feature_modules(list(layers))
    ]
    logits(model, ids, **pictures)
    for hook in hooks:
        hook.remove()
    return torch.cat(seen, dim=-1)
