"""`hf.generate` gives what `model.generate` gives: text, stops, streams, errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from deepinfer_dspark import (  # noqa: E402
    DraftModelDrafter,
    LosslessnessError,
    NGramDrafter,
    Proposal,
    ShapeError,
    UnsupportedModelError,
)
from deepinfer_dspark.hf import HFCausal, Speculation, generate  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 256, "initializer_range": 0.4, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 5, 6], [9], list(range(3, 40))]


def build(name: str = "llama", seed: int = 2):
    torch.manual_seed(seed)
    if name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    elif name == "windowed":
        config = transformers.MistralConfig(**SIZES, sliding_window=6)
        model = transformers.MistralForCausalLM(config)
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=2,
                initializer_range=0.4, bos_token_id=1, eos_token_id=None, pad_token_id=0,
            )
        )  # fmt: skip
    return model.double().eval()


class Clock:
    """Every reading is a millisecond after the last: no step looks dearer than another."""

    def __init__(self) -> None:
        self.ticks = itertools.count()

    def __call__(self) -> float:
        return next(self.ticks) * 1e-3


def ids(prompt) -> torch.Tensor:
    return torch.tensor([prompt])


@pytest.mark.parametrize("name", ["llama", "windowed", "gpt2"])
def test_greedy_text_is_that_of_generate(name: str) -> None:
    model, seen = build(name), list[Speculation]()
    for prompt in PROMPTS:
        want = model.generate(ids(prompt), max_new_tokens=24, do_sample=False)
        got = generate(
            model,
            ids(prompt),
            max_new_tokens=24,
            do_sample=False,
            report=seen.append,
            clock=Clock(),
        )
        assert got.tolist() == want.tolist()
    assert sum(s.accepted for s in seen) > 0
    assert all(s.tokens == 24 for s in seen)
    assert all(s.rounds + s.accepted == s.tokens - 1 for s in seen)


@pytest.mark.parametrize("which", ["itself", "another"])
def test_a_draft_model_changes_nothing_but_the_passes(which: str) -> None:
    model = build()
    drafter = DraftModelDrafter(HFCausal(model if which == "itself" else build(seed=9)), 4)
    seen = list[Speculation]()
    want = model.generate(ids(PROMPTS[2]), max_new_tokens=30, do_sample=False)
    got = generate(
        model, ids(PROMPTS[2]), drafter, max_new_tokens=30, do_sample=False, report=seen.append,
        clock=Clock(),
    )  # fmt: skip
    assert got.tolist() == want.tolist()
    if which == "itself":
        assert seen[0].rounds < 15


def test_sampled_text_with_a_seed_is_that_of_generate() -> None:
    model = build()
    options = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    for seed in range(4):
        torch.manual_seed(seed)
        want = model.generate(ids(PROMPTS[0]), **options)
        torch.manual_seed(seed)
        assert generate(model, ids(PROMPTS[0]), clock=Clock(), **options).tolist() == want.tolist()


def test_processors_configuration_and_criteria_are_those_of_transformers() -> None:
    model = build()
    config = transformers.GenerationConfig(
        max_new_tokens=30, do_sample=False, repetition_penalty=1.2, no_repeat_ngram_size=3,
        min_new_tokens=5, eos_token_id=[4, 11], pad_token_id=0,
    )  # fmt: skip

    class Even(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), bool(input_ids.shape[1] >= 25))

    for extra in ({}, {"stopping_criteria": transformers.StoppingCriteriaList([Even()])}):
        for prompt in PROMPTS[:2]:
            want = model.generate(ids(prompt), generation_config=config, **extra)
            got = generate(model, ids(prompt), generation_config=config, clock=Clock(), **extra)
            assert got.tolist() == want.tolist()


def test_an_end_token_inside_accepted_drafts_ends_the_text() -> None:
    model = build()
    free = model.generate(ids(PROMPTS[0]), max_new_tokens=40, do_sample=False)[0].tolist()
    for at in (7, 12, 20):
        end = {"eos_token_id": free[at], "pad_token_id": 0, "max_new_tokens": 40}
        want = model.generate(ids(PROMPTS[0]), do_sample=False, **end)
        got = generate(model, ids(PROMPTS[0]), do_sample=False, clock=Clock(), **end)
        assert got.tolist() == want.tolist()


def test_a_streamer_gets_the_prompt_then_every_token() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[list[int]] = []
            self.ended = 0

        def put(self, value) -> None:
            self.got.append(value.reshape(-1).tolist())

        def end(self) -> None:
            self.ended += 1

    model, streamer = build(), Streamer()
    out = generate(
        model, ids(PROMPTS[0]), streamer=streamer, max_new_tokens=20, do_sample=False, clock=Clock()
    )
    assert streamer.got[0] == PROMPTS[0]
    assert sum(streamer.got, []) == out[0].tolist()  # noqa: RUF017
    assert all(len(g) == 1 for g in streamer.got[1:])
    assert streamer.ended == 1


def test_what_a_tokenizer_returns_and_plain_ids_are_both_inputs() -> None:
    model = build()
    options = {"max_new_tokens": 10, "do_sample": False}
    want = model.generate(ids(PROMPTS[0]), **options).tolist()
    mask = torch.ones(1, 5, dtype=torch.int64)
    for given in (torch.tensor(PROMPTS[0]), {"input_ids": ids(PROMPTS[0]), "attention_mask": mask}):
        assert generate(model, given, **options).tolist() == want
    named = generate(model, ids(PROMPTS[0]), return_dict_in_generate=True, **options)
    assert named.sequences.tolist() == want


def test_batches_beams_and_padding_go_to_generate_itself() -> None:
    model = build()
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    batch = {"input_ids": torch.tensor([[5, 6, 7], [0, 5, 6]]), "attention_mask": mask}
    padded = {"input_ids": torch.tensor([[0, 5, 6]]), "attention_mask": mask[1:]}
    for given, extra in (
        (batch, {}),
        (padded, {}),
        ({"input_ids": ids(PROMPTS[0])}, {"num_beams": 2}),
    ):
        options = {"max_new_tokens": 8, "do_sample": False} | extra
        want = model.generate(**given, **options)
        assert generate(model, given, **options).tolist() == want.tolist()


def test_without_speculation_the_same_loop_drafts_nothing() -> None:
    seen = list[Speculation]()
    generate(
        build(), ids(PROMPTS[0]), speculate=False, max_new_tokens=9, do_sample=False,
        report=seen.append,
    )  # fmt: skip
    assert seen == [Speculation(rounds=8, verified=0, accepted=0, tokens=9)]


def test_drafts_that_never_pay_are_soon_left_out() -> None:
    class Wrong(NGramDrafter):
        calls = 0

        def propose(self, batch, rng):
            wanted = batch.room(4)
            self.calls += int(wanted[0] > 0)
            return Proposal(np.full((1, 4), 63), wanted, conf=np.full((1, 4), 0.9))

    model, seen = build(), list[Speculation]()
    drafter = Wrong(4)
    want = model.generate(ids(PROMPTS[0]), max_new_tokens=150, do_sample=False)
    got = generate(
        model, ids(PROMPTS[0]), drafter, max_new_tokens=150, do_sample=False, report=seen.append,
        clock=Clock(),
    )  # fmt: skip
    assert got.tolist() == want.tolist()
    assert drafter.calls < 30


class Priced:
    """A clock that a model moves: a pass takes 10 ms and `share` of it a token beyond the first."""

    def __init__(self, model, share: float) -> None:
        self.now, self.widths = 0.0, list[int]()

        def passed(module, args, kwargs) -> None:
            width = kwargs["input_ids"].shape[1]
            self.widths.append(width)
            self.now += 0.010 * (1.0 + share * (width - 1))

        model.register_forward_pre_hook(passed, with_kwargs=True)

    def __call__(self) -> float:
        return self.now


def spent(model, prompt, new: int, share: float) -> tuple[float, Speculation]:
    """Milliseconds a token behind the prompt, and what was done."""
    seen, clock = list[Speculation](), Priced(model, share)
    generate(
        model, ids(prompt), max_new_tokens=new, do_sample=False, report=seen.append, clock=clock
    )
    return 1e3 * (clock.now - 0.010 * (1 + share * (len(prompt) - 1))) / (new - 1), seen[0]


def test_the_budget_decides_text_by_text() -> None:
    """Text with few repeats, then text that runs in circles, then again."""
    model = build(seed=7)  # wide passes cost little: circles are drafted whatever came before
    for prompt, circles in ((list(range(3, 60)), False), (PROMPTS[0], True)) * 2:
        ms, done = spent(model, prompt, 60, 0.05)
        assert ms < (5.0 if circles else 10.2)
        assert done.accepted > (30 if circles else 5)
    model = build(seed=7)  # a second token costs two passes: one trial, then nothing
    tried = [spent(model, prompt, 60, 2.0) for prompt in (list(range(3, 60)), *[PROMPTS[0]] * 3)]
    assert sum(done.verified for _, done in tried) == 1
    assert all(ms < 10.5 for ms, _ in tried)


def test_what_cannot_be_done_is_named() -> None:
    model = build()

    class Random(NGramDrafter):
        def propose(self, batch, rng):
            return Proposal(np.zeros((1, 2), int), np.array([2]), q=np.full((1, 2, 64), 1 / 64))

    cases = [
        ({"inputs": [[1, 2]]}, ShapeError, "tensor"),
        ({"inputs": torch.zeros(1, 0, dtype=torch.int64)}, ShapeError, "n >= 1"),
        (
            {"inputs": ids([1]), "return_dict_in_generate": True, "output_scores": True},
            UnsupportedModelError, "output_scores",
        ),
        (
            {"inputs": {"input_ids": ids([1]), "pixel_values": torch.zeros(1)}},
            UnsupportedModelError, "pixel_values",
        ),
        ({"inputs": ids([1, 2]), "drafter": Random(2)}, LosslessnessError, "q=None"),
    ]  # fmt: skip
    for options, error, says in cases:
        with pytest.raises(error, match=says):
            generate(model, **options, max_new_tokens=4, do_sample=False)
