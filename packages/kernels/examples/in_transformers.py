"""One operator inside a model of transformers, eager and compiled: the README's ten lines, run.

    pip install 'transformers>=5' && python packages/kernels/examples/in_transformers.py

A random small Llama generates as before, every one of its norms being `ops.rms_norm`; then the
whole model is compiled in one graph with the operator in it. Needs no download.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from deepinfer_kernels import ops, registry


class Norm(nn.Module):
    def __init__(self, old: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = old.weight
        self.eps: float = old.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


def with_our_norms(model: nn.Module) -> int:
    """Replaces every norm of a Llama in place; returns how many there were."""
    found = [(n, m) for n, m in model.named_modules() if type(m).__name__ == "LlamaRMSNorm"]
    for name, old in found:
        model.set_submodule(name, Norm(old))
    return len(found)


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 512, (1, 12))
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        before = model.generate(prompt, **options)
        wanted = model(prompt).logits
        norms = with_our_norms(model)
        after = model.generate(prompt, **options)
        logits = model(prompt).logits
    assert torch.equal(before, after), "other text"
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    print(f"{norms} norms by {registry.choose('rms_norm').impl.backend}: the same 24 tokens")

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=keep)
    with torch.no_grad():
        torch.testing.assert_close(compiled(prompt, use_cache=False).logits, logits)
    calls = [node for node in graphs[0].graph.nodes if "deepinfer" in str(node.target)]
    assert len(graphs) == 1, "the model fell into several graphs"
    assert len(calls) == norms
    print(f"compiled: one graph, {len(calls)} nodes {calls[0].target}")

    loss = model(prompt, labels=prompt).loss
    loss.backward()
    grads = [p.grad is not None for n, p in model.named_parameters() if "norm" in n]
    assert grads
    assert all(grads), "a norm's weight has no gradient"
    print(f"gradients reach the weights of all {len(grads)} norms")


if __name__ == "__main__":
    main()
