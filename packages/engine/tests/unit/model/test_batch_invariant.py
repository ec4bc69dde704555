"""Batch-invariant mode: in float32 and bfloat16, a token's logits are the same bits in any batch,
read in any chunks; so sampled text is the same in any company, drafted or not, parked or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dense_checkpoint
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_requests import WAYS, check_equal, model_requests, run_all

from deepinfer_engine import LLM, SamplingParams
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.model.names import model_directory
from deepinfer_engine.model.runner import build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_kernels import batch_invariant
from deepinfer_kernels.native.library import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"C++ forms: {unavailable()}")

SEQUENCES, LENGTH = 6, 200
DTYPES = ("float32", "bfloat16")
MODELS = ("demo", "qwen3")


class Model:
    """A runner, token ids of some sequences, and the logits of each read alone."""

    def __init__(self, folder: Path, dtype: str) -> None:
        blocks = SEQUENCES * 2 + 1
        self.runner = build_runner(
            folder, dtype=dtype, num_blocks=blocks, num_state_slots=SEQUENCES + 1,
            batch_invariant=True,
        )  # fmt: skip
        vocab = self.runner.caps.vocab_size
        self.ids = np.random.default_rng(0).integers(4, vocab, size=(SEQUENCES, LENGTH))
        first = [self.run([(0, at, at + 1)])[0] for at in range(LENGTH)]
        # The others in one piece: whether that is the same is what is tested.
        others = [self.run([(i, 0, LENGTH)])[0] for i in range(1, SEQUENCES)]
        self.logits = [torch.cat(first), *others]

    def run(self, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """One forward pass over (sequence, from, to); logits of every row, by part."""
        back = self.runner.caps.lookback
        for i, start, _ in parts:
            if start == 0:
                self.runner.clear_state(1 + i)
        rows = [
            SequenceRows(
                self.ids[i, a:b],
                a,
                tuple(self.ids[i, max(0, a - back) : a].tolist()) if back else (),
                list(range(1 + 2 * i, 3 + 2 * i)),
                1 + i,
            )
            for i, a, b in parts
        ]
        logits = self.runner.model.forward(rows, None)
        return list(logits.split([b - a for _, a, b in parts]))


@pytest.fixture(scope="module", params=[(m, d) for m in MODELS for d in DTYPES], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name, dtype = request.param
    if name == "demo":
        return Model(model_directory(None), dtype)
    folder = tmp_path_factory.mktemp(name)
    dense_checkpoint.write_dense(folder, name)
    return Model(folder, dtype)


def batches(seed: int) -> Iterator[list[tuple[int, int, int]]]:
    """Random passes that read every sequence once: some of them at a time, in pieces."""
    random = np.random.default_rng(seed)
    usual = random.choice([1, 6, 40, 200])
    at = [0] * SEQUENCES
    while any(here < LENGTH for here in at):
        parts = []
        for i in random.permutation(SEQUENCES).tolist():
            if at[i] == LENGTH or random.random() < 0.3:
                continue
            size = 1 if random.random() < 0.5 else int(random.integers(1, usual + 1))
            parts.append((i, at[i], min(LENGTH, at[i] + size)))
            at[i] = parts[-1][2]
        if parts:
            yield parts


@settings(max_examples=4, deadline=None)
@example(seed=1)
@given(seed=st.integers(0, 2**32))
def test_logits_are_the_same_bits_in_any_batch_and_any_chunks(model: Model, seed: int) -> None:
    for parts in batches(seed):
        for (i, a, b), got in zip(parts, model.run(parts), strict=True):
            assert torch.equal(got, model.logits[i][a:b]), (i, a, b)


class AnyDrafts:
    """A budget of drafts that follows nothing."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def pays(self, sequences: int) -> bool:
        return bool(self._random.random() < 0.9)

    def lengths(self, proposal: object, most: np.ndarray) -> np.ndarray:
        return np.minimum(most, self._random.integers(0, 6, size=len(most)))

    def sits_out(self, sequences: int) -> None: ...

    def observe(self, lengths: np.ndarray, accepted: np.ndarray) -> None: ...

    def timed(self, *args: int, **named: bool) -> None: ...


@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_say_the_same_however_they_are_run(dtype: str) -> None:
    """Greedy and coupled, batched, overlapped and drafted, in memory too small for all of them."""

    def runner(nextn: int, blocks: int):
        built = build_runner(
            model_directory(None), dtype=dtype, nextn=nextn, num_blocks=blocks, num_state_slots=12,
            batch_invariant=True,
        )  # fmt: skip
        built._budget = AnyDrafts()  # type: ignore[assignment]
        return built

    requests = model_requests(1, 14, 300)
    oracle = run_all(requests, nextn=0, runner=runner(0, 64), alone=True, max_num_seqs=1)
    seen: Counter[str] = Counter()
    for way in ("batched", "overlapped, drafts"):
        options = WAYS[way]
        config = {key: value for key, value in options.items() if key != "nextn"}
        said = run_all(
            requests,
            nextn=options["nextn"],
            runner=runner(options["nextn"], 10),
            max_num_seqs=6,
            max_num_batched_tokens=256,
            decode_reserve_tokens=0,
            park_bytes=1 << 20 if options["nextn"] else 0,
            **config,
        )
        seen.update(run_all.counters)  # type: ignore[attr-defined]
        check_equal(requests, said, oracle, way)
    for what in ("preemptions", "parked", "recomputed", "mixed_steps", "accepted_tokens"):
        assert seen[what], what


def test_a_seed_gives_one_text_offline_whatever_else_is_asked(tmp_path: Path) -> None:
    folder = dense_checkpoint.write_dense(tmp_path / "m", "llama", seed=3)
    params = SamplingParams(temperature=1, seed=7, max_tokens=24, ignore_eos=True)
    prompts = [list(range(3 + i, 60 + 9 * i)) for i in range(6)]
    with LLM(folder, dtype="float32", num_blocks=64, batch_invariant=True) as llm:
        together = llm.generate(prompts, params)
    options = {"num_blocks": 64, "nextn": 0, "prefix_cache_bytes": 0}
    with LLM(folder, dtype="float32", batch_invariant=True, **options) as llm:  # type: ignore[arg-type]
        assert [llm.generate([p], params)[0].token_ids for p in prompts] == [
            c.token_ids for c in together
        ]


def test_processes_that_share_experts_keep_the_mode() -> None:
    """Wherever an expert lies, its output is the same and is added in the token's order."""
    params = SamplingParams(temperature=1, seed=7, max_tokens=6, ignore_eos=True)
    prompts = [list(range(5 + i, 40 + 9 * i)) for i in range(4)]
    options = {"num_blocks": 48, "max_num_seqs": 4, "prefix_cache_bytes": 0}
    with LLM(dtype="float32", dp=2, batch_invariant=True, **options) as llm:  # type: ignore[arg-type]
        together = [c.token_ids for c in llm.generate(prompts, replace(params, logprobs=1))]
        bits = [c.logprobs for c in llm.generate(prompts, replace(params, logprobs=1))]
        alone = [llm.generate([p], replace(params, logprobs=1))[0] for p in prompts]
    assert [c.token_ids for c in alone] == together
    assert [c.logprobs for c in alone] == bits


def test_a_cache_written_in_another_mode_is_not_taken(tmp_path: Path) -> None:
    folder = dense_checkpoint.write_dense(tmp_path / "m")
    for model in (folder, model_directory(None)):
        hashes = {
            build_runner(
                model, num_state_slots=4, num_blocks=8, batch_invariant=mode
            ).layout.layout_hash
            for mode in (False, True)
        }
        assert len(hashes) == 2


def test_where_the_mode_cannot_be_kept_loading_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="batch_invariant must be True or False, got 1"):
        LLM(batch_invariant=1)  # type: ignore[arg-type]
    folder = dense_checkpoint.write_dense(tmp_path / "m")
    monkeypatch.setattr(batch_invariant, "unavailable", lambda: "is not built")
    for model in (folder, None):
        with pytest.raises(ConfigError, match=r"batch_invariant: .* has no batch-invariant form"):
            LLM(model, batch_invariant=True)
