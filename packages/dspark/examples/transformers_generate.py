"""dspark with transformers: the same greedy text from fewer passes of the model.

python transformers_generate.py [MODEL DIRECTORY]

Without a directory a small random Llama is made; its text is no language, but it repeats itself,
which is what n-gram drafts live on.
"""

from __future__ import annotations

import itertools
import sys

import torch
import transformers

from deepinfer_dspark.hf import generate


def small_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def main() -> None:
    if len(sys.argv) > 1:
        model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
        ids = tokenizer("One two three, one two three, one two", return_tensors="pt").input_ids
    else:
        model, ids = small_model(), torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    passes = 0

    def counted(*_: object) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_hook(counted)
    plain = model.generate(ids, max_new_tokens=60, do_sample=False)
    alone, passes = passes, 0
    # Drafts stop where they cost more than they gain; on a model this small they always do. A clock
    # that counts calls says that every pass costs the same, as it nearly does on a large one.
    clock = itertools.count(1.0).__next__
    drafted = generate(model, ids, max_new_tokens=60, do_sample=False, clock=clock)
    print(f"{alone} passes alone, {passes} with n-gram drafts")
    assert torch.equal(plain, drafted), "the text must be the same"
    assert passes < alone, "drafts were made and came true"


if __name__ == "__main__":
    main()
