"""One life of a vLLM process for `test_vllm_real.py`: reads its orders from stdin, prints JSON.

Not a test. It runs in a process of its own, so that what is found again was found on disk.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def count_preemptions() -> list[str]:
    """Requests that vLLM's scheduler preempts from now on."""
    from vllm.v1.core.sched.scheduler import Scheduler

    seen: list[str] = []
    preempt = Scheduler._preempt_request

    def counted(self, request, *args, **keywords):
        seen.append(request.request_id)
        return preempt(self, request, *args, **keywords)

    Scheduler._preempt_request = counted
    return seen


def settle() -> dict[str, int]:
    """Let the worker's cache store all it has; what has become of it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    cache = get_kv_transfer_group()._scopes.cache
    assert cache.flush(120).done
    return {
        "evicted": cache.stats()["disk"].get("gc_evicted_segments", 0),
        "corrupt": cache.stats()["disk"].get("corrupt", 0),
    }


def main() -> None:
    orders = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    preempted = count_preemptions()
    settings = {
        "model": orders["model"],
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "block_size": 32,  # what its CPU kernels take
        "enable_prefix_caching": orders.get("prefix_caching", False),
        "disable_log_stats": True,
        "seed": 0,
    }
    if orders.get("blocks"):
        settings["num_gpu_blocks_override"] = orders["blocks"]
    if orders.get("cache"):
        settings["kv_transfer_config"] = {
            "kv_connector": "KVTierConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_module_path": "deepinfer_kvtier.integrations.vllm",
            "kv_connector_extra_config": {"kvtier": orders["cache"]},
        }
    llm = LLM(**settings)
    answers = []
    for batch in orders["batches"]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=batch["tokens"], ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        answers.append(
            {
                "seconds": time.perf_counter() - started,
                "texts": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "preempted": len(preempted),
                **(settle() if orders.get("cache") else {}),
            }
        )
    llm.llm_engine.engine_core.shutdown()
    print("ANSWER " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
