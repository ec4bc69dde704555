"""Router, prefill and decode over real loopback sockets, on the toy runner."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import (
    BLOCK,
    KEY,
    LONG_TOKENS,
    PATIENCE_S,
    TOY,
    alone,
    ask,
    cluster,
    gated,
    greedy,
    hear,
    patient,
    prompt,
    request,
    run,
    start_worker,
    toy,
    until,
)

from deepinfer_engine.adapters.kvtier import open_store
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.types import SamplingParams, TokensEvent
from deepinfer_engine.errors import (
    CapacityError,
    EngineLost,
    EngineUnavailable,
    PromptTooLong,
    RequestError,
)
from deepinfer_engine.kv.memory import MemoryStore
from deepinfer_engine.pd.decode import DecodeService
from deepinfer_engine.pd.prefill import PrefillService
from deepinfer_engine.pd.transport import Connection
from deepinfer_engine.pd.wire import FrameType, Xid
from deepinfer_engine.router.attempt import Placement, _Attempt
from deepinfer_engine.router.link import Mail
from deepinfer_engine.router.remote import RemoteEngine

LONG = greedy(LONG_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(("prefill_nextn", "decode_nextn"), [(0, 0), (5, 5), (0, 3)])
def test_disaggregated_streams_say_what_each_request_says_alone(prefill_nextn, decode_nextn):
    prompts = {f"r{i}": prompt(i, 1 + 5 * i) for i in range(20)}

    async def body():
        async with cluster(
            prefills=2,
            decodes=2,
            prefill_runner=lambda: toy(nextn=prefill_nextn),
            decode_runner=lambda: toy(nextn=decode_nextn),
        ) as it:
            answers = await asyncio.gather(
                *(ask(it.engine, request(*item)) for item in prompts.items())
            )
            for tokens, answer in zip(prompts.values(), answers, strict=True):
                assert answer.tokens == alone(tokens, greedy())
                assert answer.reason in ("stop", "length")
            await until(it.idle)

    run(body())


def test_sampling_with_a_seed_and_logprobs_survives_the_hand_over():
    sampling = SamplingParams(temperature=0.7, seed=42, max_tokens=12, logprobs=2)

    async def body():
        async with cluster() as it:
            rows = []
            async for event in it.engine.generate(request("r", prompt(1, 20), sampling)):
                if isinstance(event, TokensEvent):
                    assert [lp.token for lp in event.logprobs] == list(event.token_ids)
                    rows += event.logprobs
            assert [row.token for row in rows] == alone(prompt(1, 20), sampling)
            assert all(len(row.top) == 2 for row in rows)

    run(body())


@pytest.mark.parametrize("late", [False, True], ids=["as they come", "behind the word of decode"])
def test_log_probabilities_of_a_prompt_come_with_the_first_token(late, monkeypatch):
    monkeypatch.setattr("deepinfer_engine.pd.prefill.LOGPROBS_A_PIECE", 7)
    tokens = prompt(1, 20)
    held, ready = [], asyncio.Event()
    send, following = Connection.send, _Attempt._next

    def held_back(peer, kind, body):
        if late and kind in (FrameType.FIRST, FrameType.PROMPT_LOGPROBS):
            held.append((peer, kind, body))
        else:
            send(peer, kind, body)

    async def heard(attempt):
        mail = await following(attempt)
        if mail.kind is FrameType.READY:
            ready.set()
        return mail

    monkeypatch.setattr(Connection, "send", held_back)
    monkeypatch.setattr(_Attempt, "_next", heard)

    async def body():
        async with cluster() as it:
            asked = replace(request("r", tokens, greedy()), prompt_logprobs=2)
            events = []

            async def collect():
                events.extend([event async for event in it.engine.generate(asked)])

            task = asyncio.create_task(collect())
            if late:
                await asyncio.wait_for(ready.wait(), PATIENCE_S)
                assert not events
                assert len(held) == 4
                for peer, kind, said in held:
                    send(peer, kind, said)
            await asyncio.wait_for(task, PATIENCE_S)
            first, *others, _ = events
            assert [said.token for said in first.prompt_logprobs] == list(tokens[1:])
            assert all(len(said.top) == 2 for said in first.prompt_logprobs)
            assert not any(event.prompt_logprobs for event in others)
            emitted = [token for event in events[:-1] for token in event.token_ids]
            assert emitted == alone(tokens, greedy())
            await until(it.idle)

    run(body())


@pytest.mark.parametrize("window", [TOY["window"], 0], ids=["state", "stateless"])
@pytest.mark.parametrize("kind", ["memory", "kvtier"])
def test_the_second_turn_hits_what_prefill_and_decode_published(kind, window, tmp_path):
    made = functools.partial(toy, window=window)
    shared = MemoryStore(made().layout)
    shared.close = lambda: None

    def store(runner):
        return shared if kind == "memory" else open_store(patient(tmp_path), runner.layout)

    first = prompt(1, 3 * BLOCK + 3)
    sampling = greedy(3 * BLOCK, ignore_eos=True)

    async def body():
        async with cluster(store=store, prefill_runner=made, decode_runner=made) as it:
            one = await ask(it.engine, request("one", first, sampling))
            assert one.tokens == alone(first, sampling, window=window)
            assert (one.cached, one.usage.cached_tokens) == (0, 0)
            second = [*first, *one.tokens, 1, 2, 3]
            two = await ask(it.engine, request("two", second, sampling))
            assert two.tokens == alone(second, sampling, window=window)
            assert two.cached == (len(first) + len(one.tokens) - 1) // BLOCK * BLOCK
            assert two.usage.cached_tokens == two.cached
            other = await ask(it.engine, request("three", second, sampling, salt="other"))
            assert other.cached == 0
            await it.engine.flush()
            await until(it.idle)

    run(body())


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_random_traffic_with_aborts_leaks_nothing_and_says_nothing_wrong(data):
    draw = data.draw
    decode_blocks = draw(st.integers(12, 60))
    config = EngineConfig(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=BLOCK * draw(st.integers(1, 8)),
        decode_reserve_tokens=draw(st.sampled_from([0, 8])),
    )
    asked = [
        (
            prompt(draw(st.integers(0, 3)), draw(st.integers(1, 60))),
            greedy(draw(st.integers(1, 30)), ignore_eos=draw(st.booleans())),
            draw(st.none() | st.integers(0, 4)),
        )
        for _ in range(draw(st.integers(1, 10)))
    ]
    shared = MemoryStore(toy().layout)
    shared.close = lambda: None

    async def one(it, i, tokens, sampling, leave_after):
        req = request(f"r{i}", tokens, sampling)
        if leave_after is None:
            answer = await ask(it.engine, req)
            assert answer.tokens == alone(tokens, sampling)[: len(answer.tokens)]
            if answer.reason != "insufficient_system_resource":
                assert answer.tokens == alone(tokens, sampling)
            return
        stream, seen = it.engine.generate(req), 0
        async for _ in stream:
            seen += 1
            if seen > leave_after:
                break
        await stream.aclose()

    async def body():
        async with cluster(
            store=lambda runner: shared,
            prefill_config=config,
            decode_config=config,
            decode_runner=lambda: toy(num_blocks=decode_blocks, num_state_slots=12),
        ) as it:
            await asyncio.gather(*(one(it, i, *rest) for i, rest in enumerate(asked)))
            await until(it.idle)

    run(body())


def test_closing_the_iterator_frees_both_sides_within_a_step():
    async def body():
        async with cluster(decode_runner=gated) as it:
            runner = it.decodes[0].service.runner
            stream = it.engine.generate(request("r", prompt(1, 20), LONG))
            for _ in range(3):
                await anext(stream)
            runner.gate.clear()
            runner.entered.clear()
            await until(runner.entered.is_set)
            await stream.aclose()
            runner.gate.set()
            await until(it.idle)
            assert it.decodes[0].service.loop.scheduler.counters["aborts"] == 1

    run(body())


def test_leaving_before_the_first_token_frees_both_sides():
    async def body():
        async with cluster(prefill_runner=gated) as it:
            runner = it.prefills[0].service.runner
            runner.gate.clear()
            task = asyncio.create_task(ask(it.engine, request("r", prompt(1, 20), LONG)))
            await until(runner.entered.is_set)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            runner.gate.set()
            await until(it.idle)
            assert it.prefills[0].service.loop.scheduler.counters["aborts"] == 1

    run(body())


def test_an_answer_of_one_token_frees_the_reservation():
    async def body():
        async with cluster() as it:
            answer = await ask(it.engine, request("r", prompt(1, 20), greedy(1)))
            assert answer.tokens == alone(prompt(1, 20), greedy(1))
            await until(it.idle)

    run(body())


def test_a_timeout_ends_the_request_on_both_sides():
    async def body():
        async with cluster() as it:
            answer = await ask(it.engine, request("r", prompt(1, 20), LONG, timeout_s=0.3))
            assert answer.reason == "abort"
            said = greedy(len(answer.tokens), ignore_eos=True)
            assert answer.tokens == alone(prompt(1, 20), said)
            await until(it.idle)

    run(body())


def test_a_decode_worker_lost_mid_stream_is_engine_lost_and_the_client_recovers():
    async def body():
        async with cluster() as it:
            stream = it.engine.generate(request("r", prompt(1, 20), LONG))
            for _ in range(3):
                await anext(stream)
            await it.decodes[0].kill()
            with pytest.raises(EngineLost):
                async for _ in stream:
                    pass
            with pytest.raises(EngineUnavailable) as refused:
                await ask(it.engine, request("now", (1, 2)))
            assert refused.value.retry_after_s > 0
            assert [s.ready for s in await it.engine.status()] == [True, False]
            # The same address comes back: the link is made again by itself.
            service = DecodeService(toy(), None, EngineConfig(), KEY)
            it.decodes[0] = await start_worker(service, it.decodes[0].address)
            await it.engine._wait_ready()
            again = await ask(it.engine, request("again", (1, 2)))
            assert again.tokens == alone((1, 2), greedy())
            await until(it.idle)

    run(body())


def test_a_gap_in_the_stream_is_noticed_and_the_answer_computed_from_there():
    sampling = greedy(200, ignore_eos=True)

    async def body():
        async with cluster(decode_runner=lambda: gated(ration=8)) as it:
            service = it.decodes[0].service
            stream = it.engine.generate(request("r", prompt(1, 20), sampling))
            said = [await anext(stream)]
            for peer in service.peers:  # the next TOKENS frame gets lost
                send, lost = peer.send, []

                def forgetful(kind, body, send=send, lost=lost):
                    if kind == FrameType.TOKENS and not lost:
                        lost.append(body)
                    else:
                        send(kind, body)

                peer.send = forgetful
            service.runner.open()
            said += [event async for event in stream]
            assert tokens_of(said) == alone(prompt(1, 20), sampling)
            assert it.engine.migrations == 1
            await until(it.idle)

    run(body())


def tokens_of(events):
    """The tokens of a stream, which come without a gap and with one end."""
    tokens = []
    for event in events[:-1]:
        assert event.index == len(tokens)
        assert (event.cached_tokens is None) == (event.index > 0)
        tokens += event.token_ids
    assert events[-1].usage.completion_tokens == len(tokens)
    return tokens


async def killed(worker):
    """Cut off while a step waits at the gate; the worker ends when its step thread does."""
    killing = asyncio.ensure_future(worker.kill())
    await until(lambda: not worker.service.peers)
    worker.service.runner.open()
    await killing


@pytest.mark.parametrize("options", [{}, {"presence_penalty": 0.5, "min_tokens": 150}])
def test_a_stream_whose_decode_worker_dies_goes_on_elsewhere_as_if_nothing_had_been(options):
    sampling = greedy(200, ignore_eos=not options, **options)
    tokens = prompt(1, 20)

    async def body():
        async with cluster(decodes=2, decode_runner=lambda: gated(ration=8)) as it:
            stream = it.engine.generate(request("r", tokens, sampling))
            said = await hear(stream, 4)
            (busy,) = [d for d in it.decodes if d.service.unfinished()]
            await killed(busy)
            for worker in it.decodes:
                worker.service.runner.open()
            said += [event async for event in stream]
            assert tokens_of(said) == alone(tokens, sampling)
            assert said[-1].usage.prompt_tokens == len(tokens)
            failed = [link.failures for link in it.engine._links.values() if link.failures]
            assert failed == [1]
            it.decodes.remove(busy)
            await until(it.idle)

    run(body())


def test_streams_wait_for_the_only_decode_worker_to_come_back():
    sampling = greedy(100, ignore_eos=True)

    async def body():
        async with cluster(decode_runner=lambda: gated(ration=8), recovery_s=PATIENCE_S) as it:
            streams = [it.engine.generate(request(f"r{i}", prompt(i, 20), sampling))
                       for i in range(3)]  # fmt: skip
            said = [[await anext(stream)] for stream in streams]
            await killed(it.decodes[0])

            async def rest(at):
                said[at] += [event async for event in streams[at]]

            waiting = [asyncio.create_task(rest(at)) for at in range(3)]
            service = DecodeService(toy(), None, EngineConfig(), KEY)
            it.decodes[0] = await start_worker(service, it.decodes[0].address)
            await asyncio.gather(*waiting)
            for i in range(3):
                assert tokens_of(said[i]) == alone(prompt(i, 20), sampling)
            await until(it.idle)

    run(body())


def test_an_answer_survives_one_worker_after_the_other():
    sampling = greedy(300, ignore_eos=True)

    async def body():
        async with cluster(decodes=4, decode_runner=lambda: gated(nextn=0, ration=16)) as it:
            stream = it.engine.generate(request("r", prompt(1, 20), sampling))
            said = [await anext(stream)]
            for _ in range(3):
                said += await hear(stream, 16)  # more than the worker before has left behind
                (busy,) = [d for d in it.decodes if d.service.unfinished()]
                await killed(busy)
                it.decodes.remove(busy)
            it.decodes[0].service.runner.open()
            said += [event async for event in stream]
            assert tokens_of(said) == alone(prompt(1, 20), sampling)
            assert it.engine.migrations == 3

    run(body())


def test_a_failure_is_counted_against_the_worker_that_failed_and_not_who_told():
    """Prefill tells that decode is gone: the decode worker failed."""

    async def body():
        async with cluster(decodes=2, prefill_runner=gated) as it:
            it.prefills[0].service.runner.gate.clear()
            task = asyncio.create_task(ask(it.engine, request("r", prompt(1, 20))))
            await until(lambda: it.prefills[0].service.unfinished())
            (chosen,) = [d for d in it.decodes if d.service.unfinished()]
            for peer in [p for p in chosen.service.peers if p.hello["role"] == "prefill"]:
                peer.close()
            it.prefills[0].service.runner.gate.set()
            answer = await task
            assert answer.tokens == alone(prompt(1, 20), greedy())
            failures = {(link.role, link.address): link.failures
                        for link in it.engine._links.values()}  # fmt: skip
            assert failures["prefill", it.prefills[0].address] in (0, 1)
            assert sum(failures.values()) == 1
            await until(it.idle)

    run(body())


@pytest.mark.parametrize("told_by", ["prefill", "decode"])
@pytest.mark.parametrize("blame", ["prefill", "decode"])
def test_whom_a_worker_blames_is_who_failed(told_by, blame):
    async def body():
        async with cluster() as it:
            links = {link.role: link for link in it.engine._links.values()}
            placement = Placement(links["prefill"], links["decode"])
            attempt = _Attempt(request("r", prompt(1, 20)), Xid("r", 1), placement, None)
            text = {"reason": "lost", "message": "it went away", "blame": blame}
            retry = attempt._aborted(Mail(links[told_by], FrameType.ABORT, text))
            assert retry.failed is links[blame]
            assert retry.told_by is links[told_by]
            assert links[blame].address in str(retry.final)

    run(body())


def test_a_pair_that_nobody_has_tried_is_not_used():
    async def body():
        async with cluster() as it:
            pairs, tried = it.engine._pairs, dict(it.engine._pairs._tried)
            pairs._tried.clear()
            with pytest.raises(EngineUnavailable, match="no transfer has been tried yet"):
                it.engine._place(request("r", prompt(1, 20)), (), ())
            assert not [s for s in await it.engine.status() if s.ready]
            pairs._tried.update(tried)
            assert (await ask(it.engine, request("r", prompt(1, 20)))).tokens

    run(body())


@pytest.mark.parametrize("cut", ["router", "decode"])
def test_a_prefill_worker_cut_off_before_the_first_token_is_replaced_by_another(cut):
    async def body():
        async with cluster(prefills=2, prefill_runner=gated) as it:
            for worker in it.prefills:
                worker.service.runner.gate.clear()
            task = asyncio.create_task(ask(it.engine, request("r", prompt(1, 20))))
            await until(lambda: any(w.service.unfinished() for w in it.prefills))
            (victim,) = [w for w in it.prefills if w.service.unfinished()]
            (other,) = [w for w in it.prefills if w is not victim]
            other.service.runner.gate.set()

            def links():
                return [p for p in victim.service.peers if p.hello.get("role") == cut]

            # A link cut before its request has it would only be made anew.
            await until(lambda: all(job.decode for job in victim.service._jobs.values()))
            for peer in links():
                peer.close()
            answer = await task
            assert answer.tokens == alone(prompt(1, 20), greedy())
            failures = [s.counters["router_failures"] for s in await it.engine.status()]
            assert sum(failures) == 1
            victim.service.runner.gate.set()
            await until(it.idle)

    run(body())


def test_without_a_prefill_worker_left_the_request_is_unavailable():
    async def body():
        async with cluster(prefill_runner=gated) as it:
            it.prefills[0].service.runner.gate.clear()
            task = asyncio.create_task(ask(it.engine, request("r", prompt(1, 20))))
            await until(lambda: it.prefills[0].service.unfinished())
            it.prefills[0].task.cancel()
            with pytest.raises(EngineUnavailable):
                await task
            it.prefills[0].service.runner.gate.set()
            await until(lambda: not it.decodes[0].service.unfinished())

    run(body())


def test_when_every_decode_worker_is_busy_the_request_is_unavailable():
    config = EngineConfig(max_num_seqs=1, max_queue=0)

    async def body():
        async with cluster(decodes=2, decode_config=config) as it:
            streams = [it.engine.generate(request(f"r{i}", prompt(i, 20), LONG)) for i in (1, 2)]
            for stream in streams:
                await anext(stream)
            with pytest.raises(EngineUnavailable, match="full") as refused:
                await ask(it.engine, request("r3", prompt(3, 20)))
            assert refused.value.retry_after_s > 0
            for stream in streams:
                await stream.aclose()
            await until(it.idle)

    run(body())


def test_a_request_waits_for_its_place_on_a_full_decode_worker():
    async def body():
        async with cluster(decode_config=EngineConfig(max_num_seqs=1)) as it:
            prompts = [prompt(i, 10) for i in range(5)]
            answers = await asyncio.gather(
                *(ask(it.engine, request(f"r{i}", p)) for i, p in enumerate(prompts))
            )
            assert [a.tokens for a in answers] == [alone(p, greedy()) for p in prompts]
            await until(it.idle)

    run(body())


@pytest.mark.parametrize(
    ("tokens", "error"),
    [(prompt(1, 4096), PromptTooLong), (prompt(1, 3000), CapacityError), ((), RequestError)],
)
def test_a_prompt_that_never_fits_is_refused(tokens, error):
    async def body():
        async with cluster() as it:
            with pytest.raises(error):
                await ask(it.engine, request("r", tokens))
            await until(it.idle)

    run(body())


def test_workers_with_other_layouts_are_never_paired_and_named_in_status():
    async def body():
        other = lambda: toy(fingerprint="other weights")  # noqa: E731
        async with cluster(decode_runner=other, ready_timeout_s=0) as it:
            await until(lambda: it.engine._candidates("decode"))
            await until(lambda: it.engine._candidates("prefill"))
            with pytest.raises(EngineUnavailable, match="different cache layouts"):
                await ask(it.engine, request("r", prompt(1, 20)))
            status = await it.engine.status()
            assert [s.ready for s in status] == [False, False]
            assert all("different cache layouts" in s.detail for s in status)
            (pair,) = await it.engine.problems()
            assert it.prefills[0].address in pair
            assert it.decodes[0].address in pair
            await until(it.idle)

    run(body())


@pytest.mark.parametrize("what", ["model", "dtype"])
def test_workers_of_other_models_or_dtypes_are_never_paired(what):
    async def body():
        async with cluster(decodes=2, ready_timeout_s=0) as it:
            odd = it.decodes[0]
            links = list(it.engine._links.values())
            await until(lambda: all(link.connection for link in links))
            while await it.engine.problems():
                await it.engine._changed.wait()
            for link in links:
                if link.address == odd.address:
                    link.info = replace(link.info, **{what: "other"})
            answers = [await ask(it.engine, request(f"r{i}", prompt(i, 20))) for i in range(4)]
            assert all(answer.tokens for answer in answers)
            assert [link.requests for link in links if link.address == odd.address] == [0]
            problems = await it.engine.problems()
            assert [odd.address in text and what in text for text in problems] == [True]

    run(body())


def test_a_pair_between_which_nothing_passes_is_named_and_not_chosen(monkeypatch):
    async def body():
        async with cluster(decodes=2) as it:
            while await it.engine.problems():
                await it.engine._changed.wait()
            deaf = it.decodes[0]
            real = PrefillService._connect

            async def connect(self, address):
                if address == deaf.address:
                    raise ConnectionRefusedError("no route")
                return await real(self, address)

            monkeypatch.setattr(PrefillService, "_connect", connect)
            for service in (it.prefills[0].service,):
                for task in service._decodes.values():
                    (await task).close()
            pairs = it.engine._pairs
            for link in it.engine._links.values():
                if link.address == deaf.address:
                    prefill = next(p for p in it.engine._links.values() if p.role == "prefill")
                    await pairs._try(prefill, link)
            (text,) = await it.engine.problems()
            assert deaf.address in text
            assert "no route" in text
            status = {s.name: s for s in await it.engine.status()}
            assert not status[deaf.address].ready
            for i in range(4):
                assert (await ask(it.engine, request(f"r{i}", prompt(i, 20)))).tokens
            links = it.engine._links.values()
            assert [link.requests for link in links if link.address == deaf.address] == [0]

    run(body())


def test_a_worker_that_stands_still_gets_no_requests():
    async def body():
        async with cluster(decodes=2) as it:
            stuck = it.decodes[0]
            stuck.service._thread.trouble = "a step has stood still for 9 s"
            for peer in stuck.service.peers:
                stuck.service._beat(peer)
            await until(lambda: len(it.engine._candidates("decode")) == 1)
            status = {s.name: s for s in await it.engine.status()}
            assert status[stuck.address].detail == "a step has stood still for 9 s"
            assert (await ask(it.engine, request("r", prompt(1, 20)))).tokens

    run(body())


def test_what_another_router_has_given_a_decode_worker_counts():
    async def body():
        async with cluster(decodes=2) as it:
            other = await RemoteEngine.connect(
                prefill=[w.address for w in it.prefills],
                decode=[w.address for w in it.decodes],
                cluster_key=KEY,
                ready_timeout_s=PATIENCE_S,
            )
            stream = other.generate(request("long", prompt(1, 9 * BLOCK), LONG))
            await hear(stream, 2)
            (busy,) = [w for w in it.decodes if w.service.unfinished()]
            link = it.engine._links["decode", busy.address]
            await until(lambda: link.held >= 9 * BLOCK)
            for i in range(6):
                await ask(it.engine, request(f"r{i}", prompt(i, 5)))
            assert link.requests == 0
            await stream.aclose()
            await other.close()
            await until(it.idle)

    run(body())


def test_a_failing_decode_step_loses_its_streams():
    class Broken(type(toy())):
        def decode(self, rows):
            raise ArithmeticError("the device is gone")

    async def body():
        async with cluster(
            decode_runner=lambda: Broken(
                num_blocks=64, num_state_slots=8, block_tokens=BLOCK, window=12
            )
        ) as it:
            with pytest.raises(EngineLost):
                await ask(it.engine, request("r", prompt(1, 20)))
            with pytest.raises(EngineLost, match="device is gone"):
                await it.decodes[0].task

    run(body())


def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new():
    async def body():
        async with cluster(decode_runner=lambda: gated(ration=8)) as it:
            stream = it.engine.generate(request("r", prompt(1, 20), greedy(200, ignore_eos=True)))
            first = await anext(stream)
            it.decodes[0].stop.set()
            await until(lambda: not it.engine._candidates("decode"))
            with pytest.raises(EngineUnavailable):
                await ask(it.engine, request("new", (1, 2)))
            it.decodes[0].service.runner.open()
            tokens = list(first.token_ids)
            async for event in stream:
                if isinstance(event, TokensEvent):
                    tokens += event.token_ids
            assert tokens == alone(prompt(1, 20), greedy(200, ignore_eos=True))
            await it.decodes[0].task

    run(body())


def test_workers_can_be_replaced_by_others_at_other_addresses():
    async def body():
        async with cluster() as it:
            service = PrefillService(toy(), None, EngineConfig(), KEY)
            other = await start_worker(service)
            it.engine.set_workers(prefill=[other.address], decode=[w.address for w in it.decodes])
            await it.engine._wait_ready()
            answer = await ask(it.engine, request("r", prompt(1, 20)))
            assert answer.tokens == alone(prompt(1, 20), greedy())
            assert next(s.name for s in await it.engine.status()) == it.decodes[0].address
            assert service.loop.scheduler.counters["prompt_tokens"] == 20
            await other.end()

    run(body())


def test_status_carries_the_load_of_every_worker():
    async def body():
        async with cluster() as it:
            await ask(it.engine, request("r", prompt(1, 20), greedy(10, ignore_eos=True)))
            for worker in it.workers:
                for peer in worker.service.peers:
                    worker.service._beat(peer)
            statuses = {}

            def reported():
                links = it.engine._links.values()
                statuses.update({link.role: link.status() for link in links})
                return all(s.counters.get("generated_tokens") for s in statuses.values())

            await until(reported)
            assert statuses["prefill"].counters["prompt_tokens"] == 20
            assert statuses["decode"].counters["generated_tokens"] == 9
            assert statuses["decode"].counters["transfer_units"] >= 2
            assert statuses["decode"].gauges["blocks_writer_held"] == 0
            assert statuses["prefill"].pid is not None
            info = await it.engine.model_info()
            assert info.nextn == 5

    run(body())


def test_connect_says_which_workers_are_missing():
    async def body():
        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1: cannot connect"):
            await RemoteEngine.connect(
                prefill=["127.0.0.1:1"], decode=["127.0.0.1:1"], ready_timeout_s=0.2
            )

    run(body())
