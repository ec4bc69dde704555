"""Constrained requests through processes' parts: compiled once, refused with a reason."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from toy_engine import ask, cluster, greedy, prompt, request, run, toy, until
from toy_grammar import TENS, ToyCompiler, obeys

from deepinfer_engine.core.types import Constraint
from deepinfer_engine.errors import (
    ConstraintError,
    ConstraintsUnavailable,
    EngineUnavailable,
    SchemaTooComplex,
)
from deepinfer_engine.router.local import LocalEngine

TOKENS = prompt(1, 30)
SAMPLING = greedy(20, constraint=TENS)
BAD = Constraint("bad")


def bad_compiler(error):
    compiler = ToyCompiler()
    compiler.errors["bad"] = error
    return compiler


@contextlib.asynccontextmanager
async def local(compiler):
    engine = LocalEngine(toy(), grammars=compiler)
    try:
        yield engine
    finally:
        await engine.close()


def test_the_answer_is_the_same_in_one_process_and_over_workers():
    async def body():
        one = ToyCompiler()
        async with local(ToyCompiler()) as engine:
            alone = await ask(engine, request("r", TOKENS, SAMPLING))
        async with cluster(grammars=lambda: one) as it:
            apart = await ask(it.engine, request("r", TOKENS, SAMPLING))
            await until(it.idle)
        assert apart.tokens == alone.tokens
        assert obeys("tens", apart.tokens)
        assert one.submitted == ["tens"], "once a pair, not once a worker"
        assert one.closed

    run(body())


def test_a_grammar_that_takes_long_holds_up_its_own_request_alone():
    async def body():
        compiler = ToyCompiler()
        compiler.hold("tens")
        async with cluster(grammars=lambda: compiler) as it:
            waiting = asyncio.create_task(ask(it.engine, request("slow", TOKENS, SAMPLING)))
            await until(lambda: compiler.submitted)
            other = await ask(it.engine, request("fast", TOKENS, greedy(8, ignore_eos=True)))
            assert len(other.tokens) == 8
            assert not waiting.done()
            compiler.let_go("tens")
            assert obeys("tens", (await waiting).tokens)
            await until(it.idle)

    run(body())


def test_a_client_that_leaves_while_a_grammar_compiles_leaves_nothing_behind():
    async def body():
        compiler = ToyCompiler()
        compiler.hold("tens")
        async with cluster(grammars=lambda: compiler) as it:
            task = asyncio.create_task(ask(it.engine, request("r", TOKENS, SAMPLING)))
            await until(lambda: compiler.submitted)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(it.idle)
            # Others may wait for the same grammar: it was not called off.
            assert not compiler.held["tens"].cancelled()
            compiler.let_go("tens")
            assert obeys("tens", (await ask(it.engine, request("s", TOKENS, SAMPLING))).tokens)

    run(body())


@pytest.mark.parametrize(
    "error",
    [
        ConstraintError("no such type", param="response_format"),
        SchemaTooComplex("too long", param="tools"),
        ConstraintsUnavailable("no xgrammar"),
    ],
)
def test_a_refused_constraint_is_told_with_its_kind_and_field(error):
    async def refused(engine):
        with pytest.raises(type(error), match=str(error)) as caught:
            await ask(engine, request("bad", TOKENS, greedy(constraint=BAD)))
        assert type(caught.value) is type(error)
        assert getattr(caught.value, "param", None) == getattr(error, "param", None)
        assert obeys("tens", (await ask(engine, request("good", TOKENS, SAMPLING))).tokens)

    async def body():
        async with local(bad_compiler(error)) as engine:
            await refused(engine)
        async with cluster(grammars=lambda: bad_compiler(error)) as it:
            await refused(it.engine)
            await until(it.idle)

    run(body())


def test_a_beginning_that_does_not_fit_is_the_clients_fault():
    async def body():
        async with local(ToyCompiler()) as engine:
            with pytest.raises(ConstraintError, match="does not fit"):
                await ask(
                    engine, request("r", TOKENS, greedy(constraint=Constraint("tens", "wrong")))
                )

    run(body())


def test_without_a_compiler_only_what_is_promised_is_refused():
    async def refused(engine):
        with pytest.raises(ConstraintsUnavailable, match=r"./packages/engine\[grammar\]"):
            await ask(engine, request("r", TOKENS, SAMPLING))
        free = await ask(engine, request("free", TOKENS, greedy(9)))
        hoped = greedy(9, constraint=Constraint("tens", needed=False))
        assert (await ask(engine, request("hoped", TOKENS, hoped))).tokens == free.tokens

    async def body():
        async with local(None) as engine:
            await refused(engine)
        async with cluster() as it:
            await refused(it.engine)
            await until(it.idle)

    run(body())


def test_a_full_compiler_is_a_reason_to_try_again():
    class Full(ToyCompiler):
        def submit(self, text):
            raise EngineUnavailable("too many grammars wait")

    async def body():
        async with local(Full()) as engine:
            with pytest.raises(EngineUnavailable, match="wait"):
                await ask(engine, request("r", TOKENS, SAMPLING))
        async with cluster(grammars=Full) as it:
            with pytest.raises(EngineUnavailable):
                await ask(it.engine, request("r", TOKENS, SAMPLING))
            await until(it.idle)

    run(body())


def test_the_workers_report_their_compilers():
    async def body():
        async with cluster(grammars=ToyCompiler) as it:
            await ask(it.engine, request("r", TOKENS, SAMPLING))
            (_, without), (counters, gauges) = (w.service.load() for w in it.workers)
            assert "grammar_queue" not in without, "prefill samples one token by decode's mask"
            assert counters["grammar_compilations"] == 1
            assert gauges["grammar_queue"] == 0
            for worker in it.workers:
                assert worker.service.load()[0]["constrained_requests"] == 1

    run(body())


def test_the_bound_of_thinking_comes_with_the_request_not_with_the_grammar():
    async def body():
        compiler = ToyCompiler()
        async with cluster(grammars=lambda: compiler) as it:
            limited = greedy(20, constraint=Constraint("tens", think_tokens=3))
            decode = it.workers[1].service
            entered = []
            submit = decode.landings.run
            decode.landings.run = lambda attempt, seq: (
                entered.append(seq.constraint.grammar.most),
                submit(attempt, seq),
            )
            for name, sampling in (("a", limited), ("b", SAMPLING)):
                await ask(it.engine, request(name, TOKENS, sampling))
            assert entered == [3, None]
            assert {*compiler.submitted} == {"tens"}

    run(body())
