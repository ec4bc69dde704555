"""Offline use: `LLM(path).generate(prompts, SamplingParams(...))`, like the engines people know."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.pictures import Picture, place
from deepinfer_engine.core.types import (
    FinishEvent,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from deepinfer_engine.errors import ConstraintsUnavailable, PromptTooLong, RequestError

if TYPE_CHECKING:
    from deepinfer_engine.core.grammars import GrammarCompiler
    from deepinfer_engine.core.runner import Caps
    from deepinfer_engine.model.family import CacheQuant, ReplayMode


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt became. `text` leaves special tokens out; `token_ids` holds them."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()


class LLM:
    """One model in this process: prompts in, completions out, continuously batched.

    model: a model directory, a .gguf file, `smollm2` (after `deepinfer pull smollm2`), or
        `org/name` of the Hugging Face hub; None is the embedded demo model.
    dtype: "float32", "bfloat16" or "float64". nextn: drafts a step, 0 = no speculation.
    replay: "compact" runs only the end of a prompt through all layers (approximate).
    cache_dir: keep prompt caches there, shared with servers that use the same model and
        directory; None keeps nothing beyond a request.

    Raises CheckpointError or ConfigError. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "float32",
        nextn: int | None = None,
        cache_quant: CacheQuant = "reference",
        replay: ReplayMode = "off",
        cache_dir: str | Path | None = None,
        max_num_seqs: int = 16,
        num_blocks: int = 1024,
        device: str = "cpu",
    ) -> None:
        # Here and not above: importing the package must not import torch.
        from deepinfer_engine.codec.pictures import PictureIntake, PicturePolicy
        from deepinfer_engine.core.device import Device
        from deepinfer_engine.core.runner import BLOCK_TOKENS
        from deepinfer_engine.model.files import load_tokenizer
        from deepinfer_engine.model.names import model_directory
        from deepinfer_engine.model.runner import build_runner
        from deepinfer_engine.router.local import LocalEngine

        directory = model_directory(model)
        config = EngineConfig(max_num_seqs=max_num_seqs)
        self._tokenizer = load_tokenizer(directory)
        runner = build_runner(
            directory,
            dtype=dtype,
            nextn=nextn,
            num_blocks=num_blocks,
            num_state_slots=max_num_seqs + config.max_num_batched_tokens // BLOCK_TOKENS + 2,
            cache_quant=cache_quant,
            replay=replay,
            device=Device.parse(device),
        )
        store = None
        if cache_dir is not None:
            from deepinfer_engine.adapters.kvtier import open_store

            store = open_store(Path(cache_dir), runner.layout)
        self._caps = runner.caps
        self._intake = PictureIntake.of_directory(directory, PicturePolicy())
        self._engine = LocalEngine(
            runner, store=store, config=config, grammars=_grammars(directory, runner.caps)
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="deepinfer-llm", daemon=True
        )
        self._thread.start()

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        images: Sequence[Sequence[bytes | str | Path]] | None = None,
    ) -> list[Completion]:
        """Continue every prompt; results in the order of the prompts.

        prompts: texts (encoded as they are, special tokens recognised) or lists of token ids; one
            prompt alone is allowed. params: one set for all; an unset seed is drawn for each.
        images: the pictures of each prompt, for a model with a vision tower: encoded bytes or the
            path of a file (WebP, PNG, JPEG, GIF). The prompt holds one image token for each.

        Raises RequestError before anything runs when a prompt cannot be served; ConstraintError,
        SchemaTooComplex or ConstraintsUnavailable when `params.constraint` cannot be enforced.
        """
        from deepinfer_engine.core.sampling_params import validate

        if self._loop.is_closed():
            raise RequestError("generate: this LLM is closed")
        params = params or SamplingParams()
        validate(params, self._caps.vocab_size)
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        if images is not None and len(images) != len(encoded):
            raise RequestError(
                f"images: wanted one list of pictures for each of {len(encoded)} prompts, got "
                f"{len(images)}"
            )
        requests = [
            self._request(ids, params, images[i] if images else ()) for i, ids in enumerate(encoded)
        ]
        return asyncio.run_coroutine_threadsafe(self._run(requests), self._loop).result()

    def close(self) -> None:
        """Stop the engine and its thread; harmless twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._engine.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        ids = (
            tuple(self._tokenizer.encode(prompt, add_special_tokens=False).ids)
            if isinstance(prompt, str)
            else tuple(prompt)
        )
        if not ids:
            raise RequestError("a prompt must hold at least one token")
        wrong = next((t for t in ids if not 0 <= t < self._caps.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"a prompt holds token {wrong}; this model's ids are 0..{self._caps.vocab_size - 1}"
            )
        return ids

    def _request(
        self, ids: tuple[int, ...], params: SamplingParams, images: Sequence[bytes | str | Path]
    ) -> GenerateRequest:
        pictures: tuple[Picture, ...] = ()
        if images:
            ids, pictures = self._with_pictures(ids, images)
        if len(ids) >= self._caps.max_model_len:
            raise PromptTooLong(len(ids), self._caps.max_model_len - 1)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return GenerateRequest(
            request_id=f"llm-{secrets.token_hex(8)}",
            token_ids=ids,
            sampling=replace(params, seed=seed),
            pictures=pictures,
        )

    def _with_pictures(
        self, ids: tuple[int, ...], images: Sequence[bytes | str | Path]
    ) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        if self._intake is None:
            raise RequestError("this model takes no pictures; send text alone")
        try:
            encoded = [i if isinstance(i, bytes) else Path(i).read_bytes() for i in images]
        except OSError as error:
            raise RequestError(f"cannot read a picture: {error}") from error
        return place(ids, self._intake.of_bytes(encoded), self._intake.rules)

    async def _run(self, requests: list[GenerateRequest]) -> list[Completion]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(request)) for request in requests]
        except ExceptionGroup as errors:
            # One set of parameters: what one request raises, all would have.
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, request: GenerateRequest) -> Completion:
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        async for event in self._engine.generate(request):
            if isinstance(event, FinishEvent):
                text = self._tokenizer.decode(tokens, skip_special_tokens=True)
                return Completion(text, tuple(tokens), event.reason, event.usage, tuple(logprobs))
            tokens.extend(event.token_ids)
            logprobs.extend(event.logprobs)
        raise AssertionError("a generation ended without its finish event")


def _grammars(model_dir: Path, caps: Caps) -> GrammarCompiler | None:
    """The compiler of constraints; None where xgrammar is not installed. Loads nothing yet."""
    from deepinfer_engine.codec.grammars import RecipeGrammars

    try:
        return RecipeGrammars(model_dir / "tokenizer.json", caps.vocab_size)
    except ConstraintsUnavailable:
        return None


def _as_list(
    prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
) -> list[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [[p for p in prompts if isinstance(p, int)]]
    wrong = next((p for p in prompts if isinstance(p, int)), None)
    if wrong is not None:
        raise RequestError(f"prompts: token {wrong} stands beside whole prompts; put it in a list")
    return [p for p in prompts if not isinstance(p, int)]
