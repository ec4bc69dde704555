"""The vision tower: pixels of one picture to the embeddings of its span in the prompt.

Patches attend to all patches of their picture, under a rotation by row and column. The projector
joins `cell x cell` patches to one token. `RMSNorm` eps is 1e-6 here, not the text model's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, pad, scaled_dot_product_attention, silu

from deepinfer_engine.adapters.kernels import Operators
from deepinfer_engine.core.pictures import Picture, PictureRules
from deepinfer_engine.errors import RequestError
from deepinfer_engine.model.v41.config import ModelConfig, VisionConfig
from deepinfer_engine.model.v41.weights import ModelWeights
from deepinfer_engine.model.vision.weights import BlockWeights, VisionWeights

NORM_EPS = 1e-6
CACHED_TOKENS = 4096
"""Embeddings kept: chunks of one prompt, and repeats of a picture, do not run the tower again."""


class VisionTower:
    """Weights bound to their configuration. Not thread-safe."""

    def __init__(
        self,
        config: VisionConfig,
        weights: VisionWeights,
        ops: Operators,
        rules: PictureRules,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """batch_invariant: the rows of a picture have the same bits whatever others are encoded
        beside it."""
        self.rules = rules
        self._alone = batch_invariant
        self._ops = ops
        self._config = config
        self._weights = weights
        self._cache: OrderedDict[bytes, Tensor] = OrderedDict()
        self._cached_tokens = 0

    @staticmethod
    def of(config: ModelConfig, weights: ModelWeights, ops: Operators) -> VisionTower | None:
        """The tower of a model; None where it has none, or was loaded without."""
        rules = config.picture_rules
        if config.vision_config is None or weights.vision is None or rules is None:
            return None
        return VisionTower(config.vision_config, weights.vision, ops, rules)

    def span(self, picture: Picture) -> Tensor:
        """Embeddings [picture.length, H] of all its tokens, in the model dtype."""
        found = self._cache.get(picture.digest)
        if found is not None:
            self._cache.move_to_end(picture.digest)
            return found
        embedded = self.encode(_pixels(picture))
        self._cache[picture.digest] = embedded
        self._cached_tokens += len(embedded)
        while self._cached_tokens > CACHED_TOKENS and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_tokens -= len(dropped)
        return embedded

    def spans(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """Embeddings [length, H] of each picture, in one pass over all their patches."""
        images = [_pixels(picture) for picture in pictures]
        if self._alone:
            return [self.encode(image) for image in images]
        return self.encode_all(images)

    def encode(self, pixels: Tensor) -> Tensor:
        """uint8 [height, width, 3], sides in whole patches, to the span's embeddings [n, H].

        Raises RequestError for pixels of another shape or type.
        """
        return self.encode_all([pixels])[0]

    @torch.inference_mode()
    def encode_all(self, images: Sequence[Tensor]) -> list[Tensor]:
        """As `encode`, of several pictures at once. Alone, a picture gives the bits of `encode`;
        beside others sums may round otherwise."""
        cut = [self._patches(self._checked(pixels)) for pixels in images]
        grids = [(rows, columns) for _, rows, columns in cut]
        encoded = self._tower(torch.cat([patches for patches, _, _ in cut]), grids)
        parts = encoded.split([rows * columns for rows, columns in grids])
        return [
            self._with_marks(self._project(part, *grid))
            for part, grid in zip(parts, grids, strict=True)
        ]

    def _checked(self, pixels: Tensor) -> Tensor:
        size = self._config.patch_size
        shape = pixels.shape
        fits = len(shape) == 3 and shape[2] == 3 and min(shape) > 0
        if pixels.dtype != torch.uint8 or not fits or shape[0] % size or shape[1] % size:
            raise RequestError(
                f"pixels must be uint8 [height, width, 3] with sides in multiples of {size}, got "
                f"{list(shape)} of {pixels.dtype}"
            )
        return pixels

    def _patches(self, pixels: Tensor) -> tuple[Tensor, int, int]:
        """(patches [rows * columns, 3 * size * size] in scanline order, rows, columns)."""
        size = self._config.patch_size
        height, width, _ = pixels.shape
        rows, columns = height // size, width // size
        # Rounded to bfloat16 whatever the model's dtype: that is what the tower was trained on.
        scaled = ((pixels.to(torch.float32) / 255 - 0.5) / 0.5).to(torch.bfloat16)
        split = scaled.view(rows, size, columns, size, 3).permute(0, 2, 4, 1, 3)
        return split.reshape(rows * columns, -1).to(self._weights.patch.dtype), rows, columns

    def _tower(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """[patches, d] of pictures one behind the other; each attends to itself."""
        w = self._weights
        x = linear(patches, w.patch, w.patch_bias)
        angles = [self._angles(rows, columns) for rows, columns in grids]
        cos, sin = torch.cat([c for c, _ in angles]), torch.cat([s for _, s in angles])
        sizes = [rows * columns for rows, columns in grids]
        for block in w.blocks:
            normed = self._ops.rms_norm(x, block.norm1, NORM_EPS)
            x = x + self._attention(block, normed, cos, sin, sizes)
            gate, up = linear(self._ops.rms_norm(x, block.norm2, NORM_EPS), block.w1).chunk(
                2, dim=-1
            )
            x = x + linear(silu(gate) * up, block.w2)
        return self._ops.rms_norm(x, w.norm, NORM_EPS)

    def _attention(
        self, w: BlockWeights, x: Tensor, cos: Tensor, sin: Tensor, sizes: Sequence[int]
    ) -> Tensor:
        n, width = x.shape
        heads = self._config.num_attention_heads
        q, k, v = linear(x, w.wqkv, w.wqkv_bias).view(n, 3, heads, -1).permute(1, 2, 0, 3)
        pictures = zip(
            *(
                t[None].split(list(sizes), dim=2)
                for t in (_rotate(q, cos, sin), _rotate(k, cos, sin), v)
            ),
            strict=True,
        )
        out = torch.cat([scaled_dot_product_attention(*qkv) for qkv in pictures], dim=2)
        return linear(out[0].transpose(0, 1).reshape(n, width), w.wo, w.wo_bias)

    def _angles(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [rows * columns, head / 2]: the row's angles, then the column's."""
        head = self._config.hidden_size // self._config.num_attention_heads
        pair = torch.arange(head // 4, dtype=torch.float64)
        frequency = self._config.rope_theta ** (-4.0 * pair / head)
        row = torch.arange(rows, dtype=torch.float64).repeat_interleave(columns)
        column = torch.arange(columns, dtype=torch.float64).repeat(rows)
        angles = torch.cat([row[:, None] * frequency, column[:, None] * frequency], dim=1)
        dtype = self._weights.norm.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _project(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """[rows * columns, d] to cells [cell rows, cell columns, H]; beyond the edge is zero."""
        w, side = self._weights, self._config.downsample_ratio
        down, right = -rows % side, -columns % side
        grid = pad(x.view(rows, columns, -1), (0, 0, 0, right, 0, down))
        high, wide = (rows + down) // side, (columns + right) // side
        # Channel outermost inside a cell, then its rows and columns.
        cells = grid.view(high, side, wide, side, -1).permute(0, 2, 4, 1, 3).reshape(high, wide, -1)
        hidden = gelu(linear(cells, w.aligner_w1, w.aligner_w1_bias))
        return linear(hidden, w.aligner_w2, w.aligner_w2_bias)

    def _with_marks(self, cells: Tensor) -> Tensor:
        """START, each row of cells with its NEWLINE, END: [rows * (columns + 1) + 2, H]."""
        w, (rows, _, H) = self._weights, cells.shape
        lines = torch.cat([cells, w.newline.expand(rows, 1, H)], dim=1).view(-1, H)
        return torch.cat([w.start[None], lines, w.end[None]])


def _pixels(picture: Picture) -> Tensor:
    shape = (picture.height, picture.width, 3)
    return torch.from_numpy(np.frombuffer(picture.pixels, dtype=np.uint8).copy()).view(shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i with i + head / 2 of x [heads, n, head] by [n, head / 2]."""
    left, right = x.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return turned.to(x.dtype)
