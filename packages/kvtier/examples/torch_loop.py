"""kvtier in a small torch loop: a prompt that begins like an earlier one loads its keys and values
instead of computing them, in a process that was started later too.

python torch_loop.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile

import torch

import deepinfer_kvtier as kvtier

BLOCK, WIDTH, LAYERS = 128, 32, 2
LAYER_BYTES = 2 * BLOCK * WIDTH * 4  # keys and values, float32
LAYOUT = kvtier.LayoutSpec(
    BLOCK, {"block": kvtier.parts(*((f"L{i}", LAYER_BYTES) for i in range(LAYERS)))}
)


class Model(torch.nn.Module):
    """Attention layers that leave their keys and values in blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(1000, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.computed = 0

    @torch.inference_mode()
    def forward(self, tokens: list[int], cache: torch.Tensor, start: int) -> torch.Tensor:
        """Run tokens[start:]. cache: float32 [blocks, layers, 2, BLOCK, WIDTH], filled up to
        `start`; what is new is written there. Returns the last row."""
        n, x = len(tokens), self.embed(torch.tensor(tokens[start:]))
        self.computed += n - start
        mask = torch.arange(n)[None] <= torch.arange(start, n)[:, None]
        for i, layer in enumerate(self.layers):
            q, k, v = layer(x).chunk(3, dim=-1)
            own = cache[:, i].transpose(0, 1).reshape(2, -1, WIDTH).clone()
            own[0, start:n], own[1, start:n] = k, v
            cache[:, i] = own.view(2, -1, BLOCK, WIDTH).transpose(0, 1)
            scores = (q @ own[0, :n].T / WIDTH**0.5).masked_fill(~mask, float("-inf"))
            x = x + scores.softmax(dim=-1) @ own[1, :n]
        return x[-1]


def answer(model: Model, space: kvtier.Namespace, tokens: list[int]) -> torch.Tensor:
    """The model's last row, with as much of the prompt from the cache as there is."""
    blocks = -(-len(tokens) // BLOCK)
    cache = torch.zeros(blocks, LAYERS, 2, BLOCK, WIDTH)
    rows = cache.view(blocks, -1).view(torch.uint8)
    with space.match(tokens, leave_last=True) as match:
        loaded = space.load(match, dst=rows[: match.n_blocks], wait=True).wait()
        have = match.n_blocks if loaded.ok else loaded.ok_prefix
    out = model(tokens, cache, have * BLOCK)
    full = len(tokens) // BLOCK
    ticket = space.put(match.digests[have:full], rows[have:full], durability="flushed")
    ticket.wait()
    return out


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    system = [7 * i % 1000 for i in range(400)]
    model, first = Model(), [*system, 1, 2, 3]
    with kvtier.open(folder) as cache:
        answer(model, cache.namespace(LAYOUT, model="demo-1", salt="me"), first)
    print(f"first prompt: {model.computed} tokens computed of {len(first)}")

    model, second = Model(), [*system, 4, 5, 6, 7]
    with kvtier.open(folder) as cache:  # as another process would
        cached = answer(model, cache.namespace(LAYOUT, model="demo-1", salt="me"), second)
    print(f"second prompt: {model.computed} tokens computed of {len(second)}")
    anew = Model()(second, torch.zeros(4, LAYERS, 2, BLOCK, WIDTH), 0)
    print(f"largest difference from computing it anew: {(cached - anew).abs().max():.1e}")
    assert model.computed == len(second) - 3 * BLOCK
    assert torch.allclose(cached, anew, atol=1e-5)


if __name__ == "__main__":
    main()
