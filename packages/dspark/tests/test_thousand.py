"""1,000 prompts on a small transformers model: greedy text with every drafter and mode is that of
plain decoding. In float64 every token must agree; in float32 flips are counted and must be ties.

    pytest -m slow packages/dspark/tests
"""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_dspark import BudgetScheduler, SamplingBatch, StepTable
from deepinfer_dspark.drafters.mixed import DraftModelDrafter, MixedDrafter
from deepinfer_dspark.drafters.ngram import NGramDrafter
from deepinfer_dspark.loop import SpecLoop

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from deepinfer_dspark.drafters.block import DFlashDrafter, DSparkDrafter  # noqa: E402
from deepinfer_dspark.drafters.deepspec import DeepSpecConfig, DraftModule  # noqa: E402
from deepinfer_dspark.drafters.eagle import EagleConfig, EagleDrafter, EagleModule  # noqa: E402
from deepinfer_dspark.hf import HFCausal, HFTarget  # noqa: E402

VOCAB, WIDTH, NEW, BATCH, GAMMA = 96, 32, 12, 125, 3
MODES = (None, "causal", "exact", "uniform", "threshold", "fixed")
DRAFTERS = ("n-gram", "draft model", "sparse model", "mixed", "dspark", "dflash", "eagle")
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def llama(seed: int, layers: int, dtype):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def drafter(name: str, model, dtype):
    torch.manual_seed(8)
    near = HFCausal(model)  # drafts that are right, so that whole blocks are accepted too
    if name == "n-gram":
        return NGramDrafter(GAMMA, n_min=1)
    if name == "draft model":
        return DraftModelDrafter(near, GAMMA)
    if name == "sparse model":
        return DraftModelDrafter(HFCausal(llama(9, 1, dtype)), GAMMA, sparse=4)
    if name == "mixed":
        return MixedDrafter(NGramDrafter(GAMMA, n_min=1), DraftModelDrafter(near, GAMMA))
    if name == "eagle":
        config = EagleConfig(WIDTH, 48, 2, 1, VOCAB, 16, VOCAB, feature_layers=2)
        return EagleDrafter(EagleModule(config).to(dtype), GAMMA)
    head = {"markov_rank": 0 if name == "dflash" else 4, "enable_confidence_head": True}
    config = DeepSpecConfig(WIDTH, 48, 1, 2, 1, 16, VOCAB, GAMMA, (0, 1), VOCAB - 1, **head)
    module = DraftModule(config).to(dtype)
    return DFlashDrafter(module) if name == "dflash" else DSparkDrafter(module)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(12)
    # a small alphabet, so that n-grams match
    return [rng.integers(0, 12, int(rng.integers(1, 20))).tolist() for _ in range(1000)]


def scheduler(mode):
    if mode is None:
        return None
    table = StepTable(tuple(range(25, 501, 25)), tuple(1.0 + 0.1 * i for i in range(20)))
    return BudgetScheduler(table, GAMMA, mode, fixed_len=2)


@pytest.fixture(scope="module")
def plain():
    """Target and its text without drafts, by dtype, from `generate`."""
    found = {}
    given = prompts()
    for name, dtype in DTYPES.items():
        model, texts = llama(2, 2, dtype), [[] for _ in given]
        for length in {len(p) for p in given}:  # without padding
            at = [i for i, p in enumerate(given) if len(p) == length]
            ids = torch.tensor([given[i] for i in at])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW,
                                 do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip
            for i, text in zip(at, out[:, length:].tolist(), strict=True):
                texts[i] = text
        found[name] = model, texts
    return found


def is_tie(model, text: list[int], a: int, b: int) -> bool:
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, -1]
    return float((logits[a] - logits[b]).abs()) < 1e-4 * float(logits.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_thousand_prompts_give_the_text_of_plain_decoding(plain, name, dtype, capsys) -> None:
    model, expected = plain[dtype]
    given = prompts()
    for mode in MODES:
        flips = accepted = 0
        for start in range(0, len(given), BATCH):
            part = given[start : start + BATCH]
            loop = SpecLoop(
                drafter(name, model, DTYPES[dtype]), HFTarget(model, (0, 1)), scheduler(mode)
            )
            made = loop.generate(part, SamplingBatch.greedy(len(part)), NEW)
            accepted += made.accepted
            for prompt, text, own in zip(part, expected[start:], made.tokens, strict=False):
                if own == text:
                    continue
                at = next(i for i in range(NEW) if own[i] != text[i])
                assert dtype == "float32"
                assert is_tie(model, prompt + text[:at], own[at], text[at])
                flips += 1
        with capsys.disabled():
            print(f"\n  {name}, {mode or 'all drafts'}, {dtype}: {accepted} drafts accepted, "
                  f"{flips} flips at ties", end="")  # fmt: skip
        if name in ("n-gram", "draft model", "mixed"):
            assert accepted > 0
