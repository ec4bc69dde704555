"""Doubles of the server's neighbours: an engine that says what a script tells it, and a hand-driven
clock.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import tokenizers
from released_config import RELEASED
from tokenizers import AddedToken
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from deepinfer_engine.codec.pictures import PictureIntake, PicturePolicy
from deepinfer_engine.codec.recipe_codec import RecipeCodec
from deepinfer_engine.core.types import (
    FinishEvent,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    TokenLogprob,
    TokensEvent,
    Usage,
)
from deepinfer_engine.model.v41.config import ModelConfig
from deepinfer_engine.router.client import ModelInfo, WorkerStatus
from deepinfer_recipe import SpecialToken, Tokenizer


@dataclass
class Script:
    """What the fake engine does with one request.

    reason: None breaks the stream off without a word. steps: token ids of each step. gates: an
    event to wait for before step i. raise_at: (step, error). unspelled: more ids among the
    likeliest tokens.
    """

    steps: Sequence[Sequence[int]] = ()
    reason: FinishReason | None = "stop"
    cached: int = 0
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    raise_at: tuple[int, Exception] | None = None
    logprobs: bool = False
    unspelled: Sequence[int] = ()


class FakeEngine:
    """An EngineClient in memory. `live`: ids of requests that are neither over nor closed."""

    def __init__(self, script: Script | Callable[[GenerateRequest], Script]) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.live: set[str] = set()
        self.aborted: list[str] = []
        self.flushed = 0
        self.workers = [
            WorkerStatus(
                "w0",
                "single",
                ready=True,
                counters={"steps_total": 3.0},
                gauges={"running": 1.0, "blocks_total": 9.0},
            )
        ]
        self.info = ModelInfo(max_model_len=4096, vocab_size=512, nextn=2, layout_hash="h")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        self.requests.append(request)
        script = self.script(request) if callable(self.script) else self.script
        self.live.add(request.request_id)
        over = False
        try:
            index = 0
            for number, step in enumerate(script.steps):
                if (gate := script.gates.get(number)) is not None:
                    await gate.wait()
                if script.raise_at is not None and script.raise_at[0] == number:
                    raise script.raise_at[1]
                budget = request.sampling.max_tokens - index
                ids = tuple(step)[:budget]
                if ids:
                    logprobs = (
                        tuple(
                            TokenLogprob(
                                i, -0.5, ((i, -0.5), *((u, -9.0) for u in script.unspelled))
                            )
                            for i in ids
                        )
                        if script.logprobs
                        else ()
                    )
                    cached = script.cached if index == 0 else None
                    of_prompt = ()
                    if index == 0 and request.prompt_logprobs is not None:
                        of_prompt = tuple(
                            TokenLogprob(i, -2.0, ((i, -2.0),)) for i in request.token_ids[1:]
                        )
                    yield TokensEvent(index, ids, logprobs, cached, prompt_logprobs=of_prompt)
                    index += len(ids)
                if index >= request.sampling.max_tokens:
                    over = True
                    yield FinishEvent("length", self._usage(request, index, script.cached))
                    return
            if script.raise_at is not None and script.raise_at[0] >= len(script.steps):
                raise script.raise_at[1]
            over = True
            if script.reason is None:
                return
            yield FinishEvent(script.reason, self._usage(request, index, script.cached))
        finally:
            self.live.discard(request.request_id)
            if not over:
                self.aborted.append(request.request_id)

    @staticmethod
    def _usage(request: GenerateRequest, generated: int, cached: int) -> Usage:
        return Usage(len(request.token_ids), generated, cached)

    async def model_info(self) -> ModelInfo:
        return self.info

    async def status(self) -> list[WorkerStatus]:
        return self.workers

    async def problems(self) -> list[str]:
        return []

    async def flush(self) -> None:
        self.flushed += 1

    async def close(self) -> None: ...


EOS = 1


class FakeClock:
    """Time that passes only when `advance` says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[tuple[float, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self.now

    async def wait(self, tasks, timeout_s):
        timer = asyncio.get_running_loop().create_future()
        entry = (self.now + timeout_s, timer)
        self._timers.append(entry)
        try:
            done, _ = await asyncio.wait({*tasks, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._timers.remove(entry)
        return done - {timer}

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass, then let everything that became due happen."""
        await settle()
        self.now += seconds
        for due, timer in list(self._timers):
            if due <= self.now and not timer.done():
                timer.set_result(None)
        await settle()


async def settle(turns: int = 50) -> None:
    """Let every task run until it waits for something outside."""
    for _ in range(turns):
        await asyncio.sleep(0)


def byte_codec(
    names: Sequence[str] = ("toy",),
    *,
    pictures: PicturePolicy | None = None,
    web=None,
    enforces: bool = False,
) -> RecipeCodec:
    """A codec whose tokens are bytes, with every V4.1 special token; seeds count up from 1.

    pictures: for a model with the released model's tower.
    """
    seeds = itertools.count(1)
    tokenizer = Tokenizer.from_str(byte_tokenizer_json())
    intake = None
    if pictures is not None:
        image = tokenizer.special_id(SpecialToken.Image.value)
        config = ModelConfig.model_validate({**RELEASED, "image_token_id": image})
        rules = config.picture_rules
        assert rules is not None
        intake = PictureIntake(rules, pictures)
    return RecipeCodec(
        tokenizer,
        names,
        pictures=intake,
        wall=lambda: 1_700_000_000.0,
        new_seed=lambda: next(seeds),
        web=web,
        enforces=enforces,
    )


def byte_tokenizer_json() -> str:
    """`tokenizer.json`: BOS/EOS/PAD at 0..2, 256 byte tokens, the other specials above."""
    specials = [token.value for token in SpecialToken]
    first = [SpecialToken.Bos.value, SpecialToken.Eos.value, "<pad>"]
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*first, *alphabet])}
    tokenizer = tokenizers.Tokenizer(BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    rest = [token for token in specials if token not in first]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in [*first, *rest]]
    )
    return tokenizer.to_str()
