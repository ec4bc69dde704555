"""The vision tower written out from its definition: one patch, one head, one cell at a time.

Independent of the runtime on purpose, and slow; float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def _patches(pixels: Tensor, size: int) -> Tensor:
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    out = []
    for r in range(rows):
        for c in range(columns):
            piece = pixels[r * size : (r + 1) * size, c * size : (c + 1) * size]
            unit = ((piece.float() / 255 - 0.5) / 0.5).bfloat16().double()
            out.append(torch.cat([unit[:, :, channel].reshape(-1) for channel in range(3)]))
    return torch.stack(out)


def _turn(x: Tensor, row: int, column: int, theta: float) -> Tensor:
    """One head of one patch as complex numbers (channel i, channel i + half)."""
    half = len(x) // 2
    quarter = half // 2
    angles = [row * theta ** (-2 * i / half) for i in range(quarter)]
    angles += [column * theta ** (-2 * i / half) for i in range(quarter)]
    turned = torch.complex(x[:half], x[half:]) * torch.polar(
        torch.ones(half, dtype=torch.float64), torch.tensor(angles, dtype=torch.float64)
    )
    return torch.cat([turned.real, turned.imag])


def tower(t: Tensors, config: dict[str, Any], pixels: Tensor) -> Tensor:
    """uint8 [height, width, 3] to [rows * columns, d]."""
    size, heads, theta = config["patch_size"], config["num_attention_heads"], config["rope_theta"]
    columns = pixels.shape[1] // size
    x = _patches(pixels, size) @ t["vision.patch_embed.proj.weight"].T
    x = x + t["vision.patch_embed.proj.bias"]
    n, d = x.shape
    for i in range(config["num_hidden_layers"]):
        p = f"vision.blocks.{i}."
        y = _norm(x, t[p + "norm1.weight"])
        qkv = y @ t[p + "attn.wqkv.weight"].T + t[p + "attn.wqkv.bias"]
        joined = torch.zeros(n, d, dtype=torch.float64)
        for h in range(heads):
            at = slice(h * d // heads, (h + 1) * d // heads)
            q, k, v = qkv[:, :d][:, at], qkv[:, d : 2 * d][:, at], qkv[:, 2 * d :][:, at]
            where = [divmod(j, columns) for j in range(n)]
            q = torch.stack([_turn(q[j], *where[j], theta) for j in range(n)])
            k = torch.stack([_turn(k[j], *where[j], theta) for j in range(n)])
            joined[:, at] = torch.softmax(q @ k.T / math.sqrt(d // heads), dim=-1) @ v
        x = x + joined @ t[p + "attn.wo.weight"].T + t[p + "attn.wo.bias"]
        gate, up = (_norm(x, t[p + "norm2.weight"]) @ t[p + "mlp.w1.weight"].T).split(
            config["intermediate_size"], dim=-1
        )
        x = x + (gate * torch.sigmoid(gate) * up) @ t[p + "mlp.w2.weight"].T
    return _norm(x, t["vision.norm.weight"])


def span(t: Tensors, config: dict[str, Any], pixels: Tensor) -> Tensor:
    """Embeddings of the whole span of one picture."""
    side, size = config["downsample_ratio"], config["patch_size"]
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    grid = tower(t, config, pixels).view(1, rows, columns, -1).permute(0, 3, 1, 2)
    grid = torch.nn.functional.pad(grid, (0, -columns % side, 0, -rows % side))
    cells = torch.nn.functional.unfold(grid, side, stride=side)[0].T
    hidden = cells @ t["aligner.w1.weight"].T + t["aligner.w1.bias"]
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    cells = hidden @ t["aligner.w2.weight"].T + t["aligner.w2.bias"]
    wide = math.ceil(columns / side)
    out = [t["image_start"]]
    for row in cells.split(wide):
        out += [*row, t["image_newline"]]
    return torch.stack([*out, t["image_end"]])
