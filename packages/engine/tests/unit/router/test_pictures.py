"""Prompts with pictures through scheduler, prefix cache and workers, on a real tiny model."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from picture_requests import GREEDY, SIZE, pixels, request
from PIL import Image
from tiny_checkpoint import write_tiny
from toy_engine import ask, cluster, patient, run, toy, until

from deepinfer_engine import LLM
from deepinfer_engine.adapters.kvtier import open_store
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.pictures import Picture, picture_digest
from deepinfer_engine.core.types import GenerateRequest
from deepinfer_engine.errors import RequestError
from deepinfer_engine.kv.memory import MemoryStore
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.pd import messages, wire
from deepinfer_engine.pd.wire import Xid
from deepinfer_engine.router.local import LocalEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny(tmp_path_factory.mktemp("tiny-vision"), vision=True)


def runner(folder: Path, dtype: str = "float64", **options: object) -> TorchRunner:
    return build_runner(folder, dtype=dtype, num_blocks=24, num_state_slots=10, **options)


def answers(model: TorchRunner, *requests: GenerateRequest, store=None, **config) -> list:
    """One after the other in one engine."""
    out = []

    async def body() -> None:
        engine = LocalEngine(model, store=store, config=EngineConfig(**config))
        try:
            out.extend([await ask(engine, one) for one in requests])
        finally:
            await engine.close()

    run(body())
    return out


def test_the_picture_decides_the_answer_and_chunks_do_not(folder: Path) -> None:
    model = runner(folder)
    cat, dog = request(model, "a", 1), request(model, "b", 2)
    one, two = answers(model, cat, dog)
    assert one.tokens != two.tokens
    # Chunks of a block: the first border lies inside the span (tokens 110 to 153).
    (cut,) = answers(model, cat, max_num_batched_tokens=128)
    assert cut.tokens == one.tokens
    # Here it lies two tokens behind the span: the look-back of the second chunk reaches into it.
    early = request(model, "a", 1, text=82)
    assert early.pictures[0].end == 126
    (one,), (cut,) = (answers(model, early, max_num_batched_tokens=size) for size in (2048, 128))
    assert cut.tokens == one.tokens


def test_decoding_right_behind_a_picture_equals_a_longer_prompt(folder: Path) -> None:
    model = runner(folder)
    # Two words after the picture: the look-back of the first steps reaches into the span.
    short = request(model, "a", 1, text=2)
    (drafted,) = answers(model, short)
    assert drafted.usage.drafted_tokens > 0
    for given in (1, 2, 4):
        longer = replace(short, token_ids=(*short.token_ids, *drafted.tokens[:given]))
        (rest,) = answers(model, longer)
        assert rest.tokens[: 8 - given] == drafted.tokens[given:]
    (plain,) = answers(runner(folder, nextn=0), short)
    assert plain.tokens == drafted.tokens


@pytest.mark.parametrize("kind", ["memory", "kvtier"])
def test_the_same_picture_hits_the_cache_and_another_one_does_not(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    model = runner(folder)
    layout = model.layout
    store = MemoryStore(layout) if kind == "memory" else open_store(patient(tmp_path), layout)
    both = request(model, "a", 1, 2)
    asked = [both, replace(both, request_id="b"), request(model, "c", 1, 3), request(model, "d", 4)]
    found = answers(model, *asked, store=store)
    cold = answers(model, *asked)
    assert [a.tokens for a in found] == [a.tokens for a in cold]
    # Spans at 110 and 264: block 0 holds the first picture, block 2 the second.
    assert [a.cached for a in found] == [0, 384, 256, 0]


def test_workers_get_pixels_and_caches_from_each_other(folder: Path) -> None:
    model = runner(folder)
    cat, dog = request(model, "a", 1, 2), request(model, "b", 1, 3)
    expected = [one.tokens for one in answers(model, cat, dog)]
    shared = MemoryStore(model.layout)
    shared.close = lambda: None

    async def body() -> None:
        async with cluster(
            store=lambda _: shared,
            prefill_runner=lambda: runner(folder),
            decode_runner=lambda: runner(folder, vision=False),
        ) as it:
            first = await asyncio.gather(ask(it.engine, cat), ask(it.engine, dog))
            assert [a.tokens for a in first] == expected
            again = await ask(it.engine, replace(cat, request_id="c"))
            assert (again.tokens, again.cached) == (expected[0], 384)
            # What decode published behind the pictures is found by the next turn.
            sampling = replace(GREEDY, max_tokens=160)
            long = await ask(it.engine, replace(cat, request_id="d", sampling=sampling))
            tokens = (*cat.token_ids, *long.tokens)
            turn = replace(cat, request_id="e", token_ids=tokens)
            assert (await ask(it.engine, turn)).cached == (len(tokens) - 1) // 128 * 128
            await until(it.idle)
            assert not it.prefills[0].service._pixels

    run(body())


def encoded(seed: int) -> bytes:
    out = io.BytesIO()
    Image.frombytes("RGB", SIZE, pixels(seed)).save(out, "PNG")
    return out.getvalue()


def test_the_offline_engine_takes_pictures_as_bytes_and_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(encoded(1))
    params = replace(GREEDY, max_tokens=6)
    with LLM(folder, dtype="float64", num_blocks=24) as llm:
        same = llm.generate(
            ["see w0 here"] * 2, params, images=[[encoded(1)], [tmp_path / "cat.png"]]
        )
        (other,) = llm.generate("see w0 here", params, images=[[encoded(2)]])
        (bare,) = llm.generate("see w0 here", params)
        for prompts, images, words in [
            ("see w0", [[]] * 2, "one list of pictures for each of 1"),
            ("see w0 w0", [[encoded(1)]], "2 image placeholders"),
            ("see w0", [[b"GIF8"]], "picture 0: "),
            ("see w0", [[tmp_path / "dog.png"]], "cannot read a picture"),
            ("w0" * 40, [[encoded(1)] * 40], "1760 tokens"),
        ]:
            with pytest.raises(RequestError, match=words):
                llm.generate(prompts, params, images=images)
    assert same[0].token_ids == same[1].token_ids
    assert same[0].usage.prompt_tokens == bare.usage.prompt_tokens + 43
    assert len({same[0].token_ids, other.token_ids, bare.token_ids}) == 3


def test_text_alone_and_toys_refuse_pictures(folder: Path) -> None:
    cat = request(runner(folder), "a", 1)
    for model in (runner(folder, vision=False), toy(vocab_size=320)):
        with pytest.raises(RequestError, match="takes no pictures"):
            answers(model, cat)


def test_a_picture_that_cannot_be_is_refused_before_it_runs(folder: Path) -> None:
    model = runner(folder)
    good = request(model, "a", 1)
    (one,) = good.pictures
    twice = request(model, "b", 1, 2)
    wrong = {
        "pictures stand in order": replace(twice, pictures=twice.pictures[::-1]),
        "inside the": replace(good, pictures=(replace(one, start=len(good.token_ids) - 3),)),
        "must be the image token": replace(good, pictures=(replace(one, start=one.start - 1),)),
        "whole patches": replace(good, pictures=(replace(one, width=253),)),
        "at most 64 tokens": replace(good, pictures=(replace(one, width=2520, height=2520),)),
        "its span has": replace(good, pictures=(replace(one, width=126),)),
        "bytes, got": replace(good, pictures=(replace(one, pixels=one.pixels[1:]),)),
    }
    for words, one_request in wrong.items():
        with pytest.raises(RequestError, match=words):
            answers(model, one_request)


def test_a_router_refuses_more_pixels_than_a_worker_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer_engine.router.remote.MAX_PIXEL_BYTES", 1000)
    cat = request(runner(folder), "a", 1)

    async def body() -> None:
        async with cluster() as it:
            with pytest.raises(RequestError, match="a worker takes 1000"):
                await ask(it.engine, cat)
            await until(it.idle)

    run(body())


def test_pictures_survive_the_wire_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PIXEL_PIECE_BYTES", 7)
    sent = []
    for at, (width, height) in enumerate([(4, 2), (2, 6)]):
        data = bytes(range(3 * width * height))
        sent.append(Picture(9 * at, 5, width, height, picture_digest(width, height, data), data))
    asked = GenerateRequest("r", (1, 2), GREEDY, pictures=tuple(sent))
    body = wire.unpack_body(wire.pack_body(messages.request_body(asked)))
    pieces = [
        wire.unpack_body(wire.pack_body({"data": piece}))["data"]
        for piece in messages.pixel_pieces(asked)
    ]
    assert max(map(len, pieces)) == 7
    assert messages.read_request(body, Xid("r", 1), (1, 2), b"".join(pieces)) == asked
    bare = messages.read_request(body, Xid("r", 1), (1, 2))
    assert [p.pixels for p in bare.pictures] == [b"", b""]
    assert [p.digest for p in bare.pictures] == [p.digest for p in sent]
    for damaged in (b"".join(pieces[:-1]), b"".join([*pieces, b"x"]), b"".join(reversed(pieces))):
        with pytest.raises(ValueError, match="pixels"):
            messages.read_request(body, Xid("r", 1), (1, 2), damaged)
