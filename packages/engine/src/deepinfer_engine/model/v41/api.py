"""The model by itself: tokens in, logits out, caches in the caller's hands.

    model = load_model(path)
    logits, cache = model.prefill(ids)                # [n, vocab]
    logits = model.decode(cache, [token])             # [1, vocab]
    proposal = model.draft(cache, token)              # five guesses and how sure they are
    cache.truncate(cache.length - 2)

Schedulers, servers and sampling live elsewhere; this is what a test, a notebook or another engine
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.adapters.dspark import Proposal
from deepinfer_engine.core.device import CPU, Device
from deepinfer_engine.errors import RequestError
from deepinfer_engine.model.family import CacheQuant, ReplayMode
from deepinfer_engine.model.names import model_directory
from deepinfer_engine.model.placement import tensors_on
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.v41.assembly import Parts, assemble
from deepinfer_engine.model.v41.backbone import Backbone
from deepinfer_engine.model.v41.batch import Batch
from deepinfer_engine.model.v41.cache import Cache, CacheMemory, Ids, token_array
from deepinfer_engine.model.v41.draft import Drafter
from deepinfer_engine.model.vision.image_rows import Images
from deepinfer_engine.model.vision.tower import VisionTower


def load_model(
    path: str | Path,
    *,
    dtype: str = "bfloat16",
    cache_quant: CacheQuant = "reference",
    replay: ReplayMode = "off",
    keep: int | None = None,
    device: str = CPU.name,
) -> Model:
    """Read a checkpoint directory (bf16, or the released FP8/FP4 layout).

    dtype: "bfloat16", "float32" or "float64", of activations and matrices.
    cache_quant: "reference" rounds cache records as the released model does, "none" keeps them.
    replay, keep: bounded replay of prompts, see `Replay`; only the last `keep` tokens of a prompt
        run through the consumer layers.

    Raises CheckpointError naming the file or tensor at fault, ConfigError for an argument.
    """
    where = Device.parse(device)
    with tensors_on(where):
        parts = assemble(
            model_directory(path),
            dtype=dtype,
            cache_quant=cache_quant,
            replay=replay,
            keep=keep,
            device=where,
        )
        return Model(parts)


class Model:
    """Weights and cache memory. Not thread-safe. Made by `load_model`."""

    def __init__(self, parts: Parts) -> None:
        self.config = parts.config
        """The checkpoint's `config.json`."""
        self.replay = parts.replay
        """How prompts are replayed."""
        self._text = parts.config.text_config
        self._memory = CacheMemory(parts.pools(num_blocks=9, num_slots=5), self._text)
        self._backbone = Backbone(
            self._text, parts.weights, self._memory.pools, parts.engram, parts.replay
        )
        self._drafter = Drafter(self._backbone) if parts.weights.draft is not None else None
        self._tower = VisionTower.of(parts.config, parts.weights, parts.ops)

    def new_cache(self) -> Cache:
        """An empty sequence."""
        return Cache(self._memory)

    def prefill(
        self,
        ids: Ids,
        *,
        cache: Cache | None = None,
        prompt_len: int | None = None,
        images: Sequence[tuple[int, Tensor]] = (),
    ) -> tuple[Tensor, Cache]:
        """Feed the tokens of a prompt, or a further chunk of it.

        ids: int [n], n >= 1.
        cache: continue this sequence (and return it); default a new one.
        prompt_len: length of the whole prompt when more chunks follow; only bounded replay needs
            it. Default: the prompt ends with this chunk.
        images: (index into ids, embeddings [k, H]) of each run of tokens of a picture, as
            `encode_image` gives them; a run may be part of a span that a chunk border cuts. What
            `ids` holds there does not matter.

        Returns (logits, cache): logits float32 (float64 in a float64 model) [n, vocab], row i
        predicting the token after ids[i]. With replay "compact", only the rows that ran through
        all layers: the last `keep` of the prompt, at least one of every chunk.

        A cache whose blocks were imported without its state first runs the window before its end
        again, from the compressed entries alone; its rows are then approximations
        (`cache.approximate`), its stored entries stay as they were.

        Raises RequestError: no token, a token outside the vocabulary, more tokens than the model's
        length, a cache of another model, one that cannot be continued, or embeddings that do not
        fit.
        """
        fed = token_array(ids, self._text.vocab_size)
        cache = self.new_cache() if cache is None else cache
        end = cache.length + len(fed)
        total = end if prompt_len is None else prompt_len
        if total < end:
            raise RequestError(f"prompt_len must be at least {end}, the tokens so far, got {total}")
        rows = self._rows(cache, fed, replay_from=self.replay.start(total), images=tuple(images))
        first = len(rows.token_ids) - len(fed)
        if self.replay.mode == "compact":
            clip = min(rows.replay_from - rows.start, len(rows.token_ids) - 1)
            first = max(first, clip)
        logits = self._backbone.forward(
            Batch(self._text, [rows]), torch.arange(first, len(rows.token_ids))
        )
        cache.extend(fed, _image_mask(len(fed), images))
        return logits, cache

    def encode_image(self, pixels: Tensor) -> Tensor:
        """What stands for a picture in a prompt: embeddings [n, H] of START, the cells and NEWLINE
        of each row, END.

        pixels: uint8 [height, width, 3] RGB, both sides whole patches (`vision_config.patch_size`).

        Raises RequestError: the model has no tower, or the pixels have another shape or type.
        """
        if self._tower is None:
            raise RequestError("this checkpoint has no vision tower")
        return self._tower.encode(pixels)

    def decode(self, cache: Cache | Sequence[Cache], ids: Ids | Sequence[Ids]) -> Tensor:
        """Feed the next tokens of one sequence, or of several with equally many each.

        One cache and int [q]: logits [q, vocab]. S caches and int [S, q]: logits [S, q, vocab].
        Wrong guesses are taken back with `cache.truncate`. Raises RequestError as `prefill`.
        """
        if isinstance(cache, Cache):
            return self._decode([cache], [token_array(ids, self._text.vocab_size)])[0]
        fed = [token_array(one, self._text.vocab_size) for one in ids]
        if len(fed) != len(cache) or len({len(f) for f in fed}) != 1:
            raise RequestError(
                f"decode wants one list of tokens for each of {len(cache)} caches, all equally "
                f"long, got lengths {[len(f) for f in fed]}"
            )
        if len({id(c) for c in cache}) != len(cache):
            raise RequestError("decode wants different caches: one was given twice")
        return self._decode(cache, fed)

    def draft(
        self,
        cache: Cache | Sequence[Cache],
        token: int | Sequence[int],
        *,
        length: int | None = None,
        temperature: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> Proposal:
        """Guess the tokens after `token`, which was sampled but not fed yet.

        length: guesses to return, default all of the trained block (which is always run whole: a
            shorter block would be another model).
        temperature: 0 takes the likeliest; above, `rng` draws and `q` holds the laws drawn from.

        Returns a proposal of R rows (R = 1 for one cache): tokens [R, length], confidences
        [R, length], and q [R, length, vocab] or None. Raises RequestError: the model has no draft
        module, or an argument is out of range.
        """
        if self._drafter is None:
            raise RequestError("this checkpoint has no draft module")
        caches = [cache] if isinstance(cache, Cache) else list(cache)
        anchors = token_array([token] if isinstance(token, int) else token, self._text.vocab_size)
        block = self._text.dspark_block_size
        length = block if length is None else length
        if not 1 <= length <= block:
            raise RequestError(f"length must be in 1..{block} for this model, got {length}")
        if len(anchors) != len(caches):
            raise RequestError(f"draft wants one token for each of {len(caches)} caches")
        if not 0 <= temperature < float("inf") or (temperature and rng is None):
            raise RequestError(
                f"temperature must be 0, or positive and finite with rng, got {temperature}"
            )
        for one in caches:
            one.require_state(self._memory)
        laws: list[Tensor] = []

        def pick(_: int, logits: Tensor) -> Tensor:
            if temperature == 0:
                return logits.argmax(-1)
            assert rng is not None
            law = torch.softmax(logits.double() / temperature, -1)
            laws.append(law)
            below = law.cumsum(-1) < torch.from_numpy(rng.random(len(caches)))[:, None] * law.sum(
                -1, keepdim=True
            )
            return below.sum(-1).clamp(max=law.shape[-1] - 1)

        drafted = self._drafter.run(
            torch.from_numpy(anchors),
            torch.tensor([one.length for one in caches]),
            torch.tensor([one.slot for one in caches]),
            block,
            pick,
        )
        return Proposal(
            tokens=drafted.tokens[:, :length].numpy(),
            lengths=np.full(len(caches), length),
            q=torch.stack(laws, 1)[:, :length] if laws else None,
            conf=drafted.confidence[:, :length].to(torch.float32).numpy(),
        )

    def _decode(self, caches: Sequence[Cache], fed: list[np.ndarray]) -> Tensor:
        rows = [self._rows(c, f, replay_from=0) for c, f in zip(caches, fed, strict=True)]
        batch = Batch(self._text, rows)
        ends = batch.first[1:]
        wanted = ends[:, None] - len(fed[0]) + torch.arange(len(fed[0]))
        logits = self._backbone.forward(batch, wanted.flatten())
        for cache, tokens in zip(caches, fed, strict=True):
            cache.extend(tokens, _image_mask(len(tokens), ()))
        return logits.view(len(caches), len(fed[0]), -1)

    def _rows(
        self, cache: Cache, fed: np.ndarray, *, replay_from: int, images: Images = ()
    ) -> SequenceRows:
        self._check_images(images, len(fed))
        end = cache.length + len(fed)
        limit = self._text.max_position_embeddings
        if end > limit:
            raise RequestError(f"the model takes at most {limit} tokens, this would make {end}")
        again = cache.lost_window(self._memory)
        start = cache.length - again
        cache.reserve(end)
        return SequenceRows(
            token_ids=np.concatenate([cache.tokens[start:], fed]),
            start=start,
            lookback=cache.lookback(start, self._text.lookback),
            block_table=cache.blocks,
            state_slot=cache.slot,
            replay_from=replay_from,
            valid_start=start if again else 0,
            entries_from=cache.length if again else 0,
            images=tuple((again + index, embeddings) for index, embeddings in images),
        )

    def _check_images(self, images: Images, length: int) -> None:
        free, embed = 0, self._backbone.weights.embed
        for index, embeddings in images:
            wanted = (len(embeddings), self._text.hidden_size)
            if embeddings.shape != wanted or embeddings.dtype != embed.dtype:
                raise RequestError(
                    f"images: wanted embeddings [k, {self._text.hidden_size}] of {embed.dtype}, "
                    f"got {list(embeddings.shape)} of {embeddings.dtype}"
                )
            if not free <= index <= length - len(embeddings):
                raise RequestError(
                    f"images: embeddings at {index} .. {index + len(embeddings) - 1} must lie in "
                    f"order and apart in the {length} tokens"
                )
            free = index + len(embeddings)
        if images and self._tower is None:
            raise RequestError("this checkpoint has no vision tower")


def _image_mask(length: int, images: Sequence[tuple[int, Tensor]]) -> np.ndarray:
    mask = np.zeros(length, dtype=np.bool_)
    for index, embeddings in images:
        mask[index : index + len(embeddings)] = True
    return mask
