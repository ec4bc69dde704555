"""`EagleDrafter`: a one-layer head that predicts the target's next feature, token after token.

The form of EAGLE-3 checkpoints (Li et al. 2025, arXiv 2503.01840); chains for batches, trees for
one request. A step at position t
reads the embedding of token t + 1 beside the feature of position t: the target's own (projected
from the hidden states of several layers) where it is known, the head's output of the step before
where it is not. The vocabulary of the head may be a part of the target's (`d2t`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from deepinfer_dspark.calibration import ProxyConfidence
from deepinfer_dspark.drafters.checkpoint import (
    load_into,
    read_config,
    read_tensors,
    rope_theta,
)
from deepinfer_dspark.drafters.contexts import Contexts, Entries, new_features
from deepinfer_dspark.drafters.deepspec import MLP, RMSNorm, rotate
from deepinfer_dspark.drafters.trees import Branches, Float, TreeShape, most_likely
from deepinfer_dspark.drafting import DraftBatch, peak_probability, sample_drafts
from deepinfer_dspark.errors import CheckpointError, ShapeError
from deepinfer_dspark.proposal import Proposal
from deepinfer_dspark.torch_extra import Tensor, functional, nn, torch, wide
from deepinfer_dspark.tree import TokenTree
from deepinfer_dspark.uniforms import Uniforms
from deepinfer_dspark.verification import VerifyResult


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes of a head; field names are the keys of its config.json.

    draft_vocab_size: rows of the head's own LM head, default the whole vocabulary.
    feature_layers: hidden states of the target that are concatenated.
    target_hidden_size: their width, where it is not the head's own.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int
    draft_vocab_size: int
    feature_layers: int = 3
    target_hidden_size: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> EagleConfig:
        """Take the known keys of a config.json, also where the layer's are nested as in the
        speculators library's; names the missing ones."""
        nested: Any = raw.get("transformer_layer_config")
        if isinstance(nested, dict):
            raw = {**cast("dict[str, Any]", nested), **raw}
        known = {k: raw[k] for k in cls.__dataclass_fields__ if raw.get(k) is not None}
        known |= rope_theta(raw)
        layers: Any = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if isinstance(layers, list):
            known["feature_layers"] = len(cast("list[Any]", layers))
        if "head_dim" not in known and {"hidden_size", "num_attention_heads"} <= known.keys():
            known["head_dim"] = known["hidden_size"] // known["num_attention_heads"]
        if "vocab_size" in known:
            known.setdefault("draft_vocab_size", known["vocab_size"])
        needed = {
            name for name, f in cls.__dataclass_fields__.items() if f.default is f.default_factory
        }
        missing = sorted(needed - known.keys())
        if missing:
            raise CheckpointError(f"draft config lacks {', '.join(missing)}")
        return cls(**known)


class EagleAttention(nn.Module):
    """Grouped-query causal attention whose queries, keys and values read [embedding; feature]."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.c = c
        width, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(width, c.hidden_size, bias=False)

    def entries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., n, kv heads, d] of inputs [..., n, 2 * hidden]."""
        shape = (*x.shape[:-1], self.c.num_key_value_heads, self.c.head_dim)
        keys = rotate(self.k_proj(x).view(shape), positions, self.c.rope_theta)
        return keys, self.v_proj(x).view(shape)

    def forward(
        self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, visible: Tensor
    ) -> Tensor:
        """x: [R, n, 2 * hidden]; keys, values: [R, m, kv heads, d]; visible: bool [R, n, m]."""
        c = self.c
        q = self.q_proj(x).view(*x.shape[:2], c.num_attention_heads, c.head_dim)
        q = rotate(q, positions, c.rope_theta)
        groups = c.num_attention_heads // c.num_key_value_heads
        k, v = (t.repeat_interleave(groups, dim=2).transpose(1, 2) for t in (keys, values))
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=visible[:, None]
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class EagleLayer(nn.Module):
    """The decoder layer: embedding and feature are normalised apart and read side by side."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.self_attn = EagleAttention(c)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def inputs(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """[..., 2 * hidden] of token embeddings and features [..., hidden]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """The next feature [..., hidden]."""
        x = feature + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleModule(nn.Module):
    """Layer, norm and LM head; parameter names are those of EAGLE-3 checkpoints."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        width = c.feature_layers * (c.target_hidden_size or c.hidden_size)
        self.fc = nn.Linear(width, c.hidden_size, bias=False)
        self.midlayer = EagleLayer(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        # target id = draft id + d2t[draft id]
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))

    def step(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        past: tuple[Tensor, Tensor],
        visible: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """New rows after `past` entries.

        tokens, positions: int64 [R, n]; features: [R, n, hidden]; past: [R, m, kv heads, d];
        visible: bool [R, n, m + n]. Returns features of the rows [R, n, hidden] and all entries.
        """
        x = self.midlayer.inputs(self.embed_tokens(tokens), features)
        k, v = self.midlayer.self_attn.entries(x, positions)
        k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        attended = self.midlayer.self_attn(x, positions, k, v, visible)
        return self.midlayer.finish(features, attended), (k, v)

    def logits(self, feature: Tensor) -> Tensor:
        """Over the target's vocabulary, -inf where the head has no token. feature: [R, hidden]."""
        own = wide(self.lm_head(self.norm(feature)))
        if own.shape[1] == self.c.vocab_size:
            return own
        d2t = self.get_buffer("d2t")
        every = own.new_full((own.shape[0], self.c.vocab_size), -torch.inf)
        return every.index_copy(1, torch.arange(d2t.numel()) + d2t, own)


class EagleDrafter:
    """Drafts of an `EagleModule`; keeps the entries of committed tokens of every request.

    The batch must carry `features` of all rows committed since the last round. Entries computed
    from the head's own features are thrown away after each round: the next one brings true ones.

    shape: of the trees that `propose_tree` makes.
    """

    def __init__(
        self, module: EagleModule, max_tokens: int = 5, *, shape: TreeShape | None = None
    ) -> None:
        if max_tokens < 1:
            raise ShapeError(f"EagleDrafter wants max_tokens >= 1, got {max_tokens}")
        self._module = module.eval()
        self.max_tokens = max_tokens
        self.shape = TreeShape() if shape is None else shape
        self._contexts = Contexts()
        self._last: dict[Hashable, Tensor] = {}
        self._proxy = ProxyConfidence(max_tokens)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        max_tokens: int = 5,
        embed: Tensor | None = None,
        shape: TreeShape | None = None,
    ) -> EagleDrafter:
        """Read config.json and *.safetensors (or pytorch_model.bin) of an EAGLE-3 head.

        embed: the target's [V, d] embedding where the checkpoint does not carry it; shape: of
        trees.
        Raises CheckpointError naming what is missing, unknown or of another shape.
        """
        module = EagleModule(EagleConfig.from_dict(read_config(directory)))
        weights = {
            # the layer is called layers.0 in the speculators library's checkpoints
            f"midlayer.{name.removeprefix('layers.0.')}"
            if name.startswith("layers.0.")
            else name: t
            for name, t in read_tensors(directory, strip=("model.",)).items()
        }
        weights.pop("t2d", None)  # the inverse of d2t
        if embed is not None:
            weights.setdefault("embed_tokens.weight", embed)
        if module.c.draft_vocab_size == module.c.vocab_size:
            weights.setdefault("d2t", module.get_buffer("d2t"))
        load_into(module, weights, directory)
        d2t = module.get_buffer("d2t")
        ids = torch.arange(d2t.numel()) + d2t
        if ids.min() < 0 or ids.max() >= module.c.vocab_size or ids.unique().numel() < ids.numel():
            raise CheckpointError(f"{directory}: d2t does not map to distinct target tokens")
        return cls(module, max_tokens, shape=shape)

    @torch.no_grad()
    def propose(self, batch: DraftBatch, rng: Uniforms) -> Proposal:
        """See `Drafter.propose`."""
        self._extend(batch)
        R, gamma = batch.requests, self.max_tokens
        tokens, lengths = np.zeros((R, gamma), dtype=np.int64), np.zeros(R, dtype=np.int64)
        conf = np.zeros((R, gamma))
        room = batch.room(gamma)
        index = np.array(
            [i for i, r in enumerate(batch.request_ids) if room[i] and r in self._contexts],
            dtype=np.int64,
        )
        if index.size == 0:
            return Proposal(tokens, lengths, conf=conf)
        ids = [batch.request_ids[i] for i in index.tolist()]
        sampling, rounds = batch.sampling.select(index), batch.rounds[index]
        entries, visible = self._contexts.padded(ids)
        feature = torch.stack([self._last[r] for r in ids])
        past = (entries[0][0], entries[0][1])
        laws: list[Tensor] = []
        peak = np.zeros((index.size, gamma))
        depth = int(room[index].max())
        for k in range(depth):
            logits = self._module.logits(feature)
            peak[:, k] = peak_probability(logits)
            tokens[index, k], law = sample_drafts(logits, sampling, rounds, k, rng)
            laws.append(law)
            if k + 1 == depth:
                break
            visible = functional.pad(visible, (0, 1), value=True)
            at = torch.from_numpy(batch.positions[index] + k)[:, None]
            fresh, past = self._module.step(
                torch.from_numpy(tokens[index, k])[:, None], feature[:, None], at, past,
                visible[:, None],
            )  # fmt: skip
            feature = fresh[:, 0]
        lengths[index], conf[index] = room[index], self._proxy.of(ids, peak)
        if not (sampling.temperature > 0).any():
            return Proposal(tokens, lengths, conf=conf)
        q = laws[0].new_zeros((R, gamma, laws[0].shape[1]))
        q[torch.from_numpy(index), :depth] = torch.stack(laws, dim=1)
        return Proposal(tokens, lengths, q=q, conf=conf)

    @torch.no_grad()
    def propose_tree(self, batch: DraftBatch, rng: Uniforms) -> TokenTree:
        """The most likely branches for the one request of the batch, whatever its temperature; see
        `TreeDrafter.propose_tree`. `rng` is not used."""
        self._extend(batch)
        request, depth = batch.request_ids[0], int(batch.room(self.shape.depth)[0])
        if depth == 0 or request not in self._contexts:
            return TokenTree(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        entries, context = self._contexts.padded([request])
        past = (entries[0][0], entries[0][1])
        features, columns = {-1: self._last[request]}, dict[int, int]()

        def expand(grown: Branches, nodes: list[int]) -> Float:
            nonlocal past
            held, n = past[0].shape[1], len(nodes)
            visible = torch.zeros(n, held + n, dtype=torch.bool)
            visible[:, : context.shape[1]] = context
            for row, node in enumerate(nodes):
                columns[node] = held + row
                visible[row, [columns[i] for i in grown.path(node)]] = True
            at = int(batch.positions[0]) + len(grown.path(nodes[0])) - 1
            fresh, past = self._module.step(
                torch.tensor([[grown.tokens[i] for i in nodes]]),
                torch.stack([features[grown.parents[i]] for i in nodes])[None],
                torch.full((1, n), at),
                past,
                visible[None],
            )
            features.update(zip(nodes, fresh[0], strict=True))
            return self._laws(fresh[0])

        return most_likely(self.shape, depth, self._laws(features[-1][None])[0], expand)

    def _laws(self, features: Tensor) -> Float:
        return torch.softmax(self._module.logits(features).double(), dim=-1).numpy()

    def _extend(self, batch: DraftBatch) -> None:
        """Entries of newly committed positions, and the feature that follows the last of them."""
        c = self._module.c
        for i, rows, at in new_features(batch, self._contexts):
            request = batch.request_ids[i]
            start, end = int(at[0]), int(at[-1]) + 1
            feature = self._module.fc(rows.to(self._module.fc.weight.dtype))[None]
            following = torch.tensor([list(batch.history[i][start + 1 : end + 1])])
            if request in self._contexts:
                held, _ = self._contexts.padded([request])
                past = (held[0][0], held[0][1])
            else:
                empty = feature.new_zeros((1, 0, c.num_key_value_heads, c.head_dim))
                past = (empty, empty)
            causal = torch.ones(end - start, end, dtype=torch.bool).tril(start)[None]
            fresh, (k, v) = self._module.step(following, feature, at[None], past, causal)
            new: Entries = [(k[0, start:], v[0, start:])]
            self._contexts.append(request, new)
            self._last[request] = fresh[0, -1]

    def observe(self, request_ids: Sequence[Hashable], result: VerifyResult) -> None:
        """Correct the confidences by what was accepted."""
        self._proxy.observe(request_ids, result)

    def reset(self, request_id: Hashable) -> None:
        """Drop the state of a request."""
        self._contexts.drop(request_id)
        self._last.pop(request_id, None)
        self._proxy.reset(request_id)

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Share the context: entries are never written in place."""
        self._contexts.fork(request_id, new_id)
        if request_id in self._last:
            self._last[new_id] = self._last[request_id]
