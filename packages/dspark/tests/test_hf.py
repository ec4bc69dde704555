"""transformers models in ragged batches: the same numbers and text as one request at a time."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_dspark import SamplingBatch, ShapeError, UnsupportedModelError
from deepinfer_dspark.drafters.mixed import DraftModelDrafter, MixedDrafter
from deepinfer_dspark.drafters.ngram import NGramDrafter
from deepinfer_dspark.loop import SpecLoop

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from deepinfer_dspark.drafters.block import DSparkDrafter  # noqa: E402
from deepinfer_dspark.drafters.deepspec import DeepSpecConfig, DraftModule  # noqa: E402
from deepinfer_dspark.drafters.eagle import EagleConfig, EagleDrafter, EagleModule  # noqa: E402
from deepinfer_dspark.hf import HFCausal, HFTarget  # noqa: E402
from deepinfer_dspark.hf.models import SHORT_PASS  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 256, "initializer_range": 0.4,
}  # fmt: skip


def llama(seed: int = 2, **changes):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes))).double()


def mistral():
    config = transformers.MistralConfig(**SIZES, sliding_window=5)
    return transformers.MistralForCausalLM(config).double()


def gemma():
    config = transformers.Gemma3TextConfig(
        **SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).double()


def qwen_eager():
    config = transformers.Qwen2Config(**SIZES, attn_implementation="eager")
    return transformers.Qwen2ForCausalLM(config).double()


def gpt2():
    # every learned position is used: padding must not ask for one more
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=29)
    return transformers.GPT2LMHeadModel(config).double()


MODELS = {"llama": llama, "mistral": mistral, "gemma": gemma, "qwen": qwen_eager, "gpt2": gpt2}


def whole(model, text: list[int]):
    """Logits of every position from one plain pass over the whole text."""
    with torch.no_grad():
        return model.eval()(torch.tensor([text])).logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_ragged_rounds_give_the_logits_of_whole_texts_whatever_was_rejected(name: str) -> None:
    torch.manual_seed(0)
    model, rng = MODELS[name](), np.random.default_rng(0)
    target = HFTarget(model)
    texts = [rng.integers(0, 64, n).tolist() for n in (6, 1, 9)]
    state, _ = target.start(texts)
    active = [0, 1, 2]
    for step in range(5):
        lens = rng.integers(0, 4, len(active))
        drafts = [rng.integers(0, 64, n).tolist() for n in lens.tolist()]
        flat, at = [], []
        for r, own in zip(active, drafts, strict=True):
            flat += [texts[r][-1], *own]
            at += list(range(len(texts[r]) - 1, len(texts[r]) + len(own)))
        cu = np.concatenate([[0], np.cumsum(lens + 1)])
        out = target.forward(np.array(flat), cu, np.array(at), state)
        for i, r in enumerate(active):
            expected = whole(model, texts[r] + drafts[i])[len(texts[r]) - 1 :]
            assert torch.allclose(out.logits[cu[i] : cu[i + 1]], expected, atol=1e-10), (step, r)
        keep = np.array([int(rng.integers(1, n + 2)) for n in lens.tolist()])
        target.commit(state, keep)
        for i, r in enumerate(active):
            texts[r] += [*drafts[i][: keep[i] - 1], int(rng.integers(0, 64))]
        if step == 2:  # the second request has ended
            state, active = target.select(state, np.array([0, 2])), [0, 2]


def test_padding_asks_a_model_for_no_position_it_does_not_have() -> None:
    model = gpt2()
    target, texts = HFTarget(model), [list(range(28)), [5, 6]]
    state, _ = target.start(texts)
    # the first request stands on the last position, the second brings four rows
    flat, at = np.array([27, 6, 1, 2, 3]), np.array([27, 1, 2, 3, 4])
    out = target.forward(flat, np.array([0, 1, 5]), at, state)
    assert torch.allclose(out.logits[0], whole(model, texts[0])[-1], atol=1e-10)
    assert torch.allclose(out.logits[1:], whole(model, [5, 6, 1, 2, 3])[1:], atol=1e-10)


def test_buffers_grow_and_keep_what_they_hold() -> None:
    model = llama(max_position_embeddings=400)
    target, texts = HFTarget(model), [[1, 2, 3] * 80, [4, 5] * 100]
    state, _ = target.start(texts)
    for _ in range(3):  # from 240 over 256
        lens = np.array([8, 8])
        flat = np.concatenate([[t[-1], *range(8)] for t in texts])
        at = np.concatenate([np.arange(len(t) - 1, len(t) + 8) for t in texts])
        out = target.forward(flat, np.array([0, 9, 18]), at, state)
        target.commit(state, lens + 1)
        texts = [[*t, *range(8), 7] for t in texts]
    for r, text in enumerate(texts):
        expected = whole(model, text[:-1])[-1]
        assert torch.allclose(out.logits[9 * r + 8], expected, atol=1e-10)


def test_entries_after_every_round_are_those_of_a_fresh_prefill() -> None:
    model, seen = llama(), []

    class Watching(HFTarget):
        def start(self, prompts):
            self.texts = [list(p[:-1]) for p in prompts]
            return super().start(prompts)

        def forward(self, tokens, cu_lens, positions, state):
            self.fed = np.split(tokens, cu_lens[1:-1])
            return super().forward(tokens, cu_lens, positions, state)

        def commit(self, state, keep):
            super().commit(state, keep)
            for r, n in enumerate(keep.tolist()):
                self.texts[r] += self.fed[r][:n].tolist()
                fresh, _ = HFTarget(model).start([[*self.texts[r], 0]])
                assert state.length[r] == len(self.texts[r])
                for held, own in zip(state.cache._keys, fresh.cache._keys, strict=True):
                    end = len(self.texts[r])
                    seen.append(float((held[r, :, :end] - own[0, :, :end]).abs().max()))

        def select(self, state, requests):
            self.texts = [self.texts[r] for r in requests.tolist()]
            return super().select(state, requests)

    drafter = DraftModelDrafter(HFCausal(llama(3)), 3)
    made = SpecLoop(drafter, Watching(model)).generate(
        [[1, 2, 3], [4], [5, 6]], SamplingBatch.uniform(3, temperature=1.5), 12
    )
    assert made.accepted < made.verified
    assert max(seen) < 1e-12


def drafters(model):
    torch.manual_seed(4)
    block = DraftModule(
        DeepSpecConfig(16, 24, 1, 2, 1, 8, 64, 3, (0, 1), 63, markov_rank=4,
                       enable_confidence_head=True)
    )  # fmt: skip
    chain = EagleModule(EagleConfig(16, 24, 2, 1, 64, 8, 64, feature_layers=2))
    return {
        "none": None,
        "n-gram": NGramDrafter(3, n_min=1),
        "small model": DraftModelDrafter(HFCausal(llama(5, num_hidden_layers=1)), 2),
        "itself": DraftModelDrafter(HFCausal(model), 3),
        "mixed": MixedDrafter(
            NGramDrafter(3, n_min=1), DraftModelDrafter(HFCausal(llama(5)), 3, sparse=8)
        ),
        "dspark": DSparkDrafter(block.double()),
        "eagle": EagleDrafter(chain.double(), 3),
    }


@pytest.mark.parametrize(
    "name", ["none", "n-gram", "small model", "itself", "mixed", "dspark", "eagle"]
)
def test_greedy_text_is_that_of_generate_with_every_drafter(name: str) -> None:
    model = llama()
    prompts = [[1, 2, 3, 4], [9, 8], [5] * 6, [7]]
    expected = [
        model.eval()
        .generate(
            torch.tensor([p]), max_new_tokens=14, do_sample=False, pad_token_id=0, eos_token_id=None
        )[0, len(p) :]
        .tolist()
        for p in prompts
    ]
    target = HFTarget(model, (0, 1))
    made = SpecLoop(drafters(model)[name], target).generate(prompts, SamplingBatch.greedy(4), 14)
    assert made.tokens == expected
    if name == "itself":
        assert made.tokens_per_pass > 3.0  # the model drafting for itself is always right


def test_a_draft_model_keeps_what_agrees_and_recomputes_the_rest() -> None:
    model = llama()
    causal = HFCausal(model)
    long = np.random.default_rng(1).integers(0, 64, SHORT_PASS + 9).tolist()
    steps = [
        (["a", "b"], [[1, 2, 3], long]),
        (["a", "b"], [[1, 2, 3, 4], long[:5]]),
        (["b"], [[*long[:4], 9, 9]]),
        (["c", "a"], [[3], [1, 5]]),
    ]
    for ids, texts in steps:
        got = causal.logits(ids, texts)
        for row, text in zip(got, texts, strict=True):
            assert torch.allclose(row, whole(model, text)[-1], atol=1e-10)
        if ids == ["b"]:
            causal.forget("b")  # its slot is given to "c"
            causal.forget("b")


def test_requests_must_continue_where_their_entries_end() -> None:
    target = HFTarget(llama())
    state, _ = target.start([[1, 2, 3]])
    with pytest.raises(ShapeError, match="start at"):
        target.forward(np.array([3]), np.array([0, 1]), np.array([5]), state)
    target.forward(np.array([3]), np.array([0, 1]), np.array([2]), state)
    with pytest.raises(ShapeError, match="commit wants"):
        target.commit(state, np.array([2]))


def test_models_that_cannot_take_tokens_back_are_refused() -> None:
    model = llama()
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        HFTarget(model)
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="sdpa"):
        HFCausal(model)
    with pytest.raises(UnsupportedModelError, match="on meta"):
        HFTarget(llama().to("meta"))
