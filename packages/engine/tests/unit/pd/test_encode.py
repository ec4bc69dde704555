"""Encode workers: the same answers as with a tower of one's own, and what travels for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from picture_requests import PIXELS, request
from seeing_cluster import seeing
from tiny_checkpoint import write_tiny
from toy_engine import KEY, ask, run

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.types import GenerateRequest
from deepinfer_engine.kv.memory import MemoryStore
from deepinfer_engine.model.encoder import build_encoder
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.pd.peers import ModelIdentity
from deepinfer_engine.router.local import LocalEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny(tmp_path_factory.mktemp("tiny-vision"), vision=True)


def runner(folder: Path, **options: object) -> TorchRunner:
    return build_runner(folder, dtype="float64", num_blocks=24, num_state_slots=10, **options)


def alone(folder: Path, *requests: GenerateRequest) -> list[list[int]]:
    """In one process, with the model's own tower."""
    out: list[list[int]] = []

    async def body() -> None:
        engine = LocalEngine(runner(folder), store=None, config=EngineConfig())
        try:
            out.extend([(await ask(engine, one)).tokens for one in requests])
        finally:
            await engine.close()

    run(body())
    return out


def real(folder: Path, **options: object):
    """The cluster on the tiny model; its prefill worker has no tower."""
    return seeing(
        build_encoder(folder, dtype="float64"),
        runner=lambda: runner(folder, tower=False),
        decode_runner=lambda: runner(folder, vision=False),
        same=ModelIdentity("the tiny model", "float64"),
        **options,
    )


def test_the_tower_alone_is_read_and_says_the_same_bits(folder: Path) -> None:
    encoder, model = build_encoder(folder, dtype="float64"), runner(folder)
    assert encoder.rules == model.caps.pictures
    one, two = request(model, "a", 1, 2).pictures
    tower = model.model._tower
    (rows,) = encoder.encode([one])
    assert bytes(rows) == tower.span(one).numpy().tobytes()
    # Beside another, sums may round otherwise, and no more than that.
    for picture, its in zip((one, two), encoder.encode([one, two]), strict=True):
        got = torch.frombuffer(bytearray(its), dtype=torch.float64).view(picture.length, -1)
        assert (got - tower.span(picture)).abs().max() < 1e-12
    assert model.model._parts.weights.embed.numel() > 0


@pytest.mark.parametrize("way", ["shared memory", "tcp", "without a key"])
def test_answers_are_those_of_a_tower_of_its_own(folder: Path, way: str) -> None:
    model = runner(folder)
    cat, dog = request(model, "a", 1, 2), request(model, "b", 1, 3)
    expected = alone(folder, cat, dog)
    key = None if way == "without a key" else KEY

    async def body() -> None:
        async with real(folder, shares_memory=way != "tcp", key=key) as it:
            found = await asyncio.gather(ask(it.engine, cat), ask(it.engine, dog))
            assert [a.tokens for a in found] == expected
            assert it.prefills[0].service.runner.model._tower is None
            assert it.counters()["encode_pictures"] == 3  # the one in both is encoded once
            assert bool(it.counters()["transfer_shared_bytes"]) == (way != "tcp")

    run(body())


def test_cached_pictures_are_not_sent_again(folder: Path) -> None:
    model = runner(folder)
    cat = request(model, "a", 1)
    shared = MemoryStore(model.layout)

    async def body() -> None:
        async with real(folder, store=shared) as it:
            await ask(it.engine, cat)
            assert (it.asked()["pictures_fetched"], it.counters()["encode_pixel_bytes"]) == (
                1,
                PIXELS,
            )
            # A prefix that covers it: nothing is asked.
            longer = request(model, "b", 1)
            tokens = (*longer.token_ids, *longer.token_ids[:130])
            await ask(it.engine, replace(longer, token_ids=tokens))
            assert it.asked()["picture_cache_hits"] == 0
            assert it.counters()["encode_pictures_asked"] == 1
            # Another salt, and so no prefix: prefill keeps the embeddings.
            await ask(it.engine, replace(cat, request_id="c", salt="other"))
            assert it.asked()["picture_cache_hits"] == 1
            assert it.counters()["encode_pictures_asked"] == 1
            # Prefill keeps none: the encode worker does, and wants no pixels.
            it.prefills[0].service.pictures.cache._drop(cat.pictures[0].digest)
            await ask(it.engine, replace(cat, request_id="d", salt="third"))
            counters = it.counters()
            assert counters["encode_pictures_asked"] == 2
            assert (counters["encode_cache_hits"], counters["encode_pictures"]) == (1, 1)
            assert counters["encode_pixel_bytes"] == PIXELS
            assert it.asked()["picture_pixel_bytes"] == PIXELS

    run(body())
