"""V4.1 draft modules in plain torch: the `mtp.*` tensors of a checkpoint directory, any dtype.

For those who have the weights in a stack of their own: `DSparkDrafter.load(directory)` reads only
the draft layers, embedding and head, dequantises what is stored in FP8 or FP4, and drafts from the
target's features. Those are, for each of `dspark_target_layer_ids`, the mean over the residual
streams as they *enter* that layer's attention, concatenated: [n, layers * hidden].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from deepinfer_dspark.drafters.block_module import BlockStates
from deepinfer_dspark.drafters.checkpoint import check_names, read_config, read_tensors
from deepinfer_dspark.drafters.contexts import Entries
from deepinfer_dspark.drafters.heads import ConfidenceHead, MarkovHead, load_v41_heads
from deepinfer_dspark.drafters.v41_layers import (
    CacheQuant,
    V41Config,
    V41Layer,
    collapse,
    linear,
    rms_norm,
)
from deepinfer_dspark.errors import CheckpointError
from deepinfer_dspark.torch_extra import Tensor, functional, nn, torch, wide

_FP32 = re.compile(r"hc_\w+$|attn_sink$|gate\.bias$")
_NOT_READ = re.compile(r"mtp\.\d+\.(embed|head)\.|.*\.gate\.bias_vl$")
_EXPERT = re.compile(r"(mtp\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.weight$")
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class V41DraftModule(nn.Module):
    """Draft layers around the target's embedding and head; parameters under checkpoint names.

    cache_quant: "reference" rounds keys as the caches of the model do and is part of it; "none"
    leaves them as they are.
    """

    def __init__(self, c: V41Config, cache_quant: CacheQuant = "reference") -> None:
        super().__init__()
        self.c, self.block_size = c, c.dspark_block_size
        self.window: int | None = c.sliding_window
        self.cache_quant: CacheQuant = cache_quant
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.head = linear(c.hidden_size, c.vocab_size)
        count = c.num_nextn_predict_layers
        self.layers = [V41Layer(c, first=i == 0, last=i == count - 1) for i in range(count)]
        self.mtp = nn.ModuleList(self.layers)
        rank = c.dspark_markov_rank
        self.markov_head: MarkovHead | None
        self.confidence_head: ConfidenceHead | None
        self.markov_head, self.confidence_head = load_v41_heads(
            {
                "markov_head.embed.weight": torch.zeros(c.vocab_size, rank),
                "markov_head.head.weight": torch.zeros(c.vocab_size, rank),
                "confidence_head.proj.weight": torch.zeros(1, c.hidden_size + rank),
            }
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the features it wants and the states it gives."""
        return self.embed.weight.dtype

    def context(self, features: Tensor, positions: Tensor) -> Entries:
        """One key a layer [n, D] for target features [n, layers * H] at positions [n]."""
        first = self.layers[0]
        assert first.main_proj is not None
        assert first.main_norm is not None
        main = rms_norm(first.main_proj(features), first.main_norm.weight, self.c.rms_norm_eps)
        return [(layer.attn.keys(main, positions, self.cache_quant),) for layer in self.layers]

    def block(
        self, anchors: Tensor, positions: Tensor, context: Entries, visible: Tensor
    ) -> BlockStates:
        """See `BlockModule.block`."""
        c, b = self.c, self.block_size
        ids = torch.full((anchors.shape[0], b), c.dspark_noise_token_id)
        ids[:, 0] = anchors
        at = positions[:, None] + torch.arange(b)[None, :]
        streams = self.embed(ids)[..., None, :].expand(-1, -1, c.hc_mult, -1)
        pending = functional.one_hot(torch.zeros_like(ids), c.hc_mult).to(wide(streams).dtype)
        last = self.layers[-1].norm
        assert last is not None
        for layer, (keys,) in zip(self.layers, context, strict=True):
            streams, pending = layer(streams, pending, at, keys, visible, self.cache_quant)
        hidden = collapse(streams, pending)
        normed = rms_norm(hidden, last.weight, c.rms_norm_eps)
        return BlockStates(wide(self.head(normed)), normed, hidden)


def load_v41(
    directory: Path,
    *,
    embed: Tensor | None = None,
    lm_head: Tensor | None = None,
    dtype: torch.dtype | None = None,
    cache_quant: CacheQuant = "reference",
) -> V41DraftModule:
    """The draft module of a V4.1 checkpoint directory.

    embed, lm_head: the target's [V, d] weights where the directory does not carry them.
    dtype: of matrices and activations, default that of the embedding; mixes, sinks and routing
    biases stay float32 (float64 in a float64 module).
    Raises CheckpointError naming what is missing, unknown or of another shape.
    """
    config = V41Config.from_dict(read_config(directory))
    raw = read_tensors(directory, strip=("model.",), only=("mtp.", "embed.weight", "head.weight"))
    raw = {name: t for name, t in raw.items() if not _NOT_READ.match(name)}
    if embed is not None:
        raw.setdefault("embed.weight", embed)
    if lm_head is not None:
        raw.setdefault("head.weight", lm_head)
    if dtype is None:
        dtype = raw["embed.weight"].dtype if "embed.weight" in raw else torch.float32
    with torch.device("meta"):
        module = V41DraftModule(config, cache_quant)
    own = module.state_dict()
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    last = f"mtp.{config.num_nextn_predict_layers - 1}."
    for name in [n for n in raw if not n.endswith(".scale")]:
        tensor = dequantised(name, raw).to(acc if _FP32.search(name) else dtype)
        del raw[name]  # the stored form of a large module does not wait for the end
        expert = _EXPERT.match(name)
        if expert:
            stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = tensor
        else:
            found[_own_name(name, last)] = tensor
    for name, parts in stacks.items():
        count = config.dspark_n_routed_experts
        absent = sorted(set(range(count)) ^ parts.keys())
        if absent:
            raise CheckpointError(
                f"{directory}: {name} wants experts 0..{count - 1}; missing or extra: {absent}"
            )
        found[name] = torch.stack([parts[e] for e in range(count)])
    check_names(own, found, directory)
    module.load_state_dict(found, assign=True)
    return module.eval().requires_grad_(False)


_HEADS = {
    "markov_head.embed.weight": "markov_head.markov_w1.weight",
    "markov_head.head.weight": "markov_head.markov_w2.weight",
    "confidence_head.proj.weight": "confidence_head.proj.weight",
}


def _own_name(name: str, last: str) -> str:
    """The heads hang on the module itself, under the names they have in every other form."""
    return _HEADS.get(name.removeprefix(last), name) if name.startswith(last) else name


def dequantised(name: str, raw: Mapping[str, Tensor]) -> Tensor:
    """The values of `name`, with the `.scale` beside it applied.

    FP8: [o, i] with a power of two for every 32 x 32 block. FP4: int8 [o, i / 2], the low half of a
    byte is the even column, with a power of two for every 32 columns of a row.
    Raises CheckpointError for a quantised tensor without a fitting scale.
    """
    tensor = raw[name]
    if tensor.dtype not in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        return tensor
    key = f"{name.removesuffix('.weight')}.scale"
    if key not in raw or tensor.dim() != 2:
        raise CheckpointError(f"{name} is stored as {tensor.dtype} and needs {key}")
    scale = raw[key].to(torch.float32)
    if tensor.dtype == torch.float8_e4m3fn:
        values, rows = tensor.to(torch.float32), 32
    else:
        codes = tensor.view(torch.uint8).to(torch.int64)
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        values = torch.where(codes < 8, 1.0, -1.0) * _E2M1[codes & 7]
        rows = 1
    wanted = (-(-values.shape[0] // rows), -(-values.shape[1] // 32))
    if tuple(scale.shape) != wanted:
        raise CheckpointError(f"{key} wants shape {wanted}, got {tuple(scale.shape)}")
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(32, 1)
    return values * spread[: values.shape[0], : values.shape[1]]
