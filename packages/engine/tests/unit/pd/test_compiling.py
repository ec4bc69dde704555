"""Whose schema is compiled when: counted by a compiler that the test holds."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future

import pytest

from deepinfer_engine.core.types import Constraint, SamplingParams
from deepinfer_engine.errors import EngineUnavailable
from deepinfer_engine.pd.compiling import WAITING_PER_KEY, FairCompiler


class Grammar:
    mask_words = 1

    def matcher(self, prefix):
        return self


class Held:
    """A compiler that finishes a text when the test says so."""

    def __init__(self) -> None:
        self.futures: dict[str, Future] = {}
        self.killed: list[str] = []

    def submit(self, text):
        self.futures[text] = Future()
        return self.futures[text]

    def abandon(self, text):
        if not self.futures[text].done():
            self.killed.append(text)

    def finish(self, text):
        self.futures[text].set_result(Grammar())


def wants(text):
    return SamplingParams(constraint=Constraint(text))


async def turns():
    for _ in range(20):
        await asyncio.sleep(0)


def test_one_key_has_one_grammar_compiled_at_a_time_and_others_do_not_wait_for_it():
    async def go():
        held = Held()
        fair = FairCompiler(held)
        mine = [asyncio.create_task(fair.compiled(wants(f"a{i}"), "a/user")) for i in range(3)]
        await turns()
        other = asyncio.create_task(fair.compiled(wants("b"), "b"))
        await turns()
        assert list(held.futures) == ["a0", "b"]
        held.finish("b")
        await other
        for i in range(3):
            held.finish(f"a{i}")
            await mine[i]
            await turns()
        assert list(held.futures) == ["a0", "b", "a1", "a2"]
        assert not fair._running
        assert not fair._waiting

    asyncio.run(go())


def test_a_request_that_has_gone_is_not_compiled_for():
    async def go():
        held = Held()
        fair = FairCompiler(held)
        first, gone, last = (
            asyncio.create_task(fair.compiled(wants(text), "a")) for text in ("x", "y", "z")
        )
        await turns()
        gone.cancel()
        held.finish("x")
        await first
        await turns()
        assert list(held.futures) == ["x", "z"]
        held.finish("z")
        await last
        assert not fair._running

    asyncio.run(go())


def test_a_compile_that_the_last_of_its_requests_has_left_is_killed():
    async def go():
        held = Held()
        fair = FairCompiler(held)
        first = asyncio.create_task(fair.compiled(wants("x"), "a"))
        second = asyncio.create_task(fair.compiled(wants("x"), "b"))
        await turns()
        first.cancel()
        await turns()
        assert held.killed == []
        second.cancel()
        await turns()
        assert held.killed == ["x"]
        assert not fair._wanted

    asyncio.run(go())


def test_a_compile_that_fails_for_nobody_is_not_told_as_an_error():
    told = []

    async def go():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        held = Held()
        fair = FairCompiler(held)
        task = asyncio.create_task(fair.compiled(wants("x"), "a"))
        await turns()
        task.cancel()
        await turns()
        held.futures["x"].set_exception(EngineUnavailable("killed"))
        await turns()
        gc.collect()
        await turns()

    asyncio.run(go())
    assert told == []


def test_too_many_of_one_key_are_told_to_come_back():
    async def go():
        fair = FairCompiler(Held())
        tasks = [
            asyncio.create_task(fair.compiled(wants(str(i)), "a"))
            for i in range(WAITING_PER_KEY + 1)
        ]
        await turns()
        with pytest.raises(EngineUnavailable, match="this key"):
            await fair.compiled(wants("more"), "a/other user")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not fair._running

    asyncio.run(go())
