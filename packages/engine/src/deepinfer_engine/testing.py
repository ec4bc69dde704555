"""What every model family promises, as tests to inherit.

A family of yours is tested by a subclass, in a file that pytest collects::

    class TestMyFamily(FamilyContract):
        def checkpoint(self, folder):
            write_a_small_random_model(folder)
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deepinfer_engine.core.runner import BLOCK_TOKENS, DecodeRow, PrefillChunk
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.model.registry import family_of, load_family_config

if TYPE_CHECKING:
    from deepinfer_engine.model.runner import TorchRunner

__all__ = ["FamilyContract"]

_GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=0)


class FamilyContract(ABC):
    """What every family promises; subclass it as a test class and say how a checkpoint is written.

    The checkpoint is small (a few layers, random weights): every test loads it in float64 and runs
    a few hundred tokens. `tolerance` bounds the difference of logits between two ways of
    computing the same.
    """

    tolerance = 1e-8
    num_blocks = 24

    @abstractmethod
    def checkpoint(self, folder: Path) -> None:
        """Write a model directory: config.json, safetensors, tokenizer.json."""
        ...

    def test_the_registry_knows_the_architecture(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = self._written(name)
            family, config = load_family_config(folder)
            assert family is family_of(folder)
            assert config.vocab_size > 3
            assert config.max_model_len > 2 * BLOCK_TOKENS
            assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)
            assert family.codec in ("deepseek_v41", "template")

    def test_any_division_into_chunks_gives_the_same_continuation(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = self._written(name)
            prompt = self._prompt(folder, BLOCK_TOKENS + 40)
            whole = self._continued(self._runner(folder), prompt, [len(prompt)])
            for cuts in ([BLOCK_TOKENS, len(prompt)], [1, 100, BLOCK_TOKENS, len(prompt)]):
                assert self._continued(self._runner(folder), prompt, cuts) == whole, cuts

    def test_neighbours_in_a_batch_change_nothing(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = self._written(name)
            runner, prompt = self._runner(folder), self._prompt(folder, 50)
            alone = self._logprobs(runner, [prompt])[0]
            beside = self._logprobs(runner, [self._prompt(folder, 70, 1), prompt, prompt[:9]])[1]
            assert alone[0] == beside[0]
            assert abs(alone[1] - beside[1]) < self.tolerance

    def test_the_bytes_of_blocks_and_state_are_all_there_is_of_a_prefix(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = self._written(name)
            first, second = self._runner(folder), self._runner(folder)
            prompt = self._prompt(folder, BLOCK_TOKENS + 10)
            expected = self._continued(self._runner(folder), prompt, [BLOCK_TOKENS, len(prompt)])
            first.clear_state(1)
            first.prefill([self._chunk(prompt, 0, BLOCK_TOKENS, [5], 1, first.caps.lookback)])
            second.block_bytes(9)[:] = first.block_bytes(5)
            if second.layout.state_bytes:
                second.state_bytes(2)[:] = first.state_bytes(1)
            start = [(BLOCK_TOKENS, len(prompt))]
            assert self._run_on(second, prompt, start, [9, 3], 2) == expected

    def test_what_an_earlier_owner_left_in_memory_is_not_read(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = self._written(name)
            runner, prompt = self._runner(folder), self._prompt(folder, 60)
            expected = self._continued(runner, prompt, [len(prompt)])
            for block in (1, 2):
                runner.block_bytes(block)[:] = b"\x7f" * runner.layout.block_bytes
            if runner.layout.state_bytes:
                runner.state_bytes(1)[:] = b"\x7f" * runner.layout.state_bytes
            assert self._continued(runner, prompt, [len(prompt)]) == expected

    def test_a_missing_tensor_is_named_at_load(self) -> None:
        from safetensors.torch import load_file, save_file

        with tempfile.TemporaryDirectory() as name:
            folder = self._written(name)
            file = sorted(folder.glob("*.safetensors"))[0]
            tensors = load_file(file)
            gone = sorted(key for key in tensors if "layers.0" in key)[0]
            del tensors[gone]
            save_file(tensors, file)
            try:
                self._runner(folder)
            except CheckpointError as error:
                text = str(error)
                assert gone in text or gone.partition(".")[2] in text, text
            else:
                raise AssertionError(f"it loads without {gone}")

    def test_it_answers_through_the_whole_engine(self) -> None:
        from deepinfer_engine.offline.llm import LLM
        from deepinfer_engine.offline.params import SamplingParams as Params

        with tempfile.TemporaryDirectory() as name:
            folder = self._written(name)
            prompts = [self._prompt(folder, n, n).tolist() for n in (5, BLOCK_TOKENS + 3)]
            params = Params(temperature=0.0, max_tokens=6, ignore_eos=True)
            with LLM(folder, dtype="float64") as llm:
                together = [answer.token_ids for answer in llm.generate(prompts, params)]
                again = [llm.generate([p], params)[0].token_ids for p in prompts]
            assert together == again
            assert all(len(tokens) == 6 for tokens in together)

    def _written(self, folder: str) -> Path:
        path = Path(folder)
        self.checkpoint(path)
        return path

    def _runner(self, folder: Path) -> TorchRunner:
        from deepinfer_engine.model.runner import build_runner

        return build_runner(
            folder, dtype="float64", nextn=0, num_blocks=self.num_blocks, num_state_slots=4
        )

    def _prompt(self, folder: Path, length: int, seed: int = 0) -> npt.NDArray[np.int64]:
        """Ids that mean nothing special in most vocabularies."""
        size = load_family_config(folder)[1].vocab_size
        return np.random.default_rng(seed).integers(size // 2, size, length)

    def _chunk(
        self,
        prompt: npt.NDArray[np.int64],
        start: int,
        end: int,
        table: Sequence[int],
        slot: int,
        lookback: int,
        **more: Any,
    ) -> PrefillChunk:
        last = end == len(prompt)
        return PrefillChunk(
            token_ids=prompt[start:end],
            start=start,
            lookback=tuple(prompt[max(0, start - lookback) : start].tolist()),
            block_table=table,
            state_slot=slot,
            sampling=_GREEDY,
            sample=last,
            prompt_len=len(prompt),
            prompt=prompt.tolist() if last else (),
            **more,
        )

    def _run_on(
        self,
        runner: TorchRunner,
        prompt: npt.NDArray[np.int64],
        parts: Sequence[tuple[int, int]],
        table: Sequence[int],
        slot: int,
    ) -> list[int]:
        """Greedy tokens behind a prompt that is computed in these parts."""
        tokens = prompt.tolist()
        for start, end in parts:
            chunk = self._chunk(prompt, start, end, table, slot, runner.caps.lookback)
            (output,) = runner.prefill([chunk])
            if output is not None:
                tokens.extend(output.tokens)
        for _ in range(6):
            row = DecodeRow(tokens, len(prompt), table, slot, _GREEDY, max_draft=0)
            tokens.extend(runner.decode([row])[0].tokens)
        return tokens[len(prompt) :]

    def _continued(
        self, runner: TorchRunner, prompt: npt.NDArray[np.int64], cuts: Sequence[int]
    ) -> list[int]:
        runner.clear_state(1)
        parts = list(zip([0, *cuts[:-1]], cuts, strict=True))
        return self._run_on(runner, prompt, parts, [1, 2], 1)

    def _logprobs(
        self, runner: TorchRunner, prompts: Sequence[npt.NDArray[np.int64]]
    ) -> list[tuple[int, float]]:
        """The first token behind each prompt, run as one batch, and its log-probability."""
        asked = SamplingParams(temperature=0.0, max_tokens=8, seed=0, logprobs=0)
        chunks: list[PrefillChunk] = []
        for i, prompt in enumerate(prompts):
            runner.clear_state(i + 1)
            chunks.append(
                PrefillChunk(
                    token_ids=prompt,
                    start=0,
                    lookback=(),
                    block_table=[10 + i],
                    state_slot=i + 1,
                    sampling=asked,
                    sample=True,
                    prompt_len=len(prompt),
                    prompt=prompt.tolist(),
                )
            )
        outputs = runner.prefill(chunks)
        return [(o.tokens[0], o.logprobs[0].logprob) for o in outputs if o is not None]
