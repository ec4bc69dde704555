"""The connector inside a real vLLM on the CPU: same text with and without the cache.

Runs in the session `kvtier-vllm`, whose environment has vLLM; elsewhere it is skipped aloud. The
model is a small Llama with random weights: what counts is whether its text stays the same.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: nox -s kvtier-vllm")
transformers = pytest.importorskip("transformers")

LIFE = Path(__file__).parent / "vllm_life.py"
PROMPT = [random.Random(1).randrange(3, 500) for _ in range(411)]
WHOLE = 384  # three blocks of 128


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import torch

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def live(model, batches, *, cache=None, **orders):
    """Answers of a vLLM process to batches of (prompts, tokens each)."""
    asked = [{"prompts": prompts, "tokens": tokens} for prompts, tokens in batches]
    orders |= {"model": model, "batches": asked, "cache": cache}
    done = subprocess.run(
        [sys.executable, str(LIFE)],
        input=json.dumps(orders),
        capture_output=True,
        text=True,
        timeout=1_500,  # ends what hangs; beside other work a life takes many minutes
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout[-2_000:] + done.stderr[-4_000:]
    return json.loads(lines[-1].removeprefix("ANSWER "))


@pytest.fixture(scope="module")
def plain(model):
    """What vLLM says without the cache."""
    (answer,) = live(model, [([PROMPT], 24)])
    return answer["texts"]


def settings(path):
    return {"path": str(path), "host_bytes": 0, "min_free_share": 0.0}


def test_evictions_from_the_cache_and_preemptions_change_nothing(model, tmp_path):
    """Four long answers at a time where vLLM has room for two, and a cache that evicts."""
    chooser = random.Random(2)
    prompts = [[chooser.randrange(3, 500) for _ in range(300)] for _ in range(4)]
    batches = [(prompts, 120), (prompts, 120)]
    expected = live(model, batches[:1], blocks=36)[0]["texts"]
    cache = settings(tmp_path / "kv") | {"quota_bytes": 4 << 20, "gc_interval_s": 0.2, "floor_s": 0}
    answers = live(model, batches, cache=cache, blocks=36)
    assert [answer["texts"] for answer in answers] == [expected, expected]
    assert answers[-1]["preempted"], "vLLM had room for all four: the test says nothing"
    assert answers[-1]["evicted"], "the cache had room for all blocks: the test says nothing"


def test_a_prompt_is_found_again_and_its_text_is_the_same_also_in_another_process(
    model, plain, tmp_path
):
    cache = settings(tmp_path / "kv")
    first, second = live(model, [([PROMPT], 24), ([PROMPT], 24)], cache=cache)
    assert (first["cached"], second["cached"]) == ([0], [WHOLE])
    assert first["texts"] == second["texts"] == plain
    (third,) = live(model, [([PROMPT], 24)], cache=cache)
    assert third["cached"] == [WHOLE]
    assert third["texts"] == plain


def test_a_damaged_block_is_computed_again(model, plain, tmp_path):
    cache = settings(tmp_path / "kv")
    live(model, [([PROMPT], 24)], cache=cache)
    damaged = 0
    for path in (tmp_path / "kv").rglob("*.kvs"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        damaged += 1
    assert damaged
    again, after = live(model, [([PROMPT], 24), ([PROMPT], 24)], cache=cache)
    assert again["texts"] == after["texts"] == plain
    assert again["corrupt"], "no damaged block was read: the test says nothing"


def test_time_to_first_token_beside_vllms_own_prefix_cache(model, tmp_path, capsys):
    """Printed, not asserted: this model is too small for a load to be worth much."""
    once = ([PROMPT], 1)
    cold, warm = live(model, [once, once], prefix_caching=True)
    first, again = live(model, [once, once], cache=settings(tmp_path / "kv"))
    assert (warm["cached"][0] > 0, again["cached"]) == (True, [WHOLE])
    with capsys.disabled():
        print(
            f"\ntime to first token of 411 tokens: {cold['seconds'] * 1e3:.1f} ms cold,"
            f" {warm['seconds'] * 1e3:.1f} ms from vLLM's prefix cache;"
            f" {first['seconds'] * 1e3:.1f} ms cold and stored,"
            f" {again['seconds'] * 1e3:.1f} ms with {again['cached'][0]} tokens from kvtier's disk"
        )
