"""Decode and prefill workers against peers that this test plays, frame by frame."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from toy_engine import (
    BLOCK,
    KEY,
    alone,
    gated,
    greedy,
    identity,
    prompt,
    request,
    run,
    start_worker,
    toy,
    until,
)
from toy_grammar import TENS, WORDS, ToyCompiler, ToyGrammar

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.constraint import mask_behind
from deepinfer_engine.core.pictures import picture_digest
from deepinfer_engine.core.runner import PrefillChunk
from deepinfer_engine.core.types import Constraint
from deepinfer_engine.core.windows import NOTHING
from deepinfer_engine.errors import ConfigError, ConstraintError, TransferError
from deepinfer_engine.pd import decode as decode_module
from deepinfer_engine.pd import prefill as prefill_module
from deepinfer_engine.pd import transport, wire
from deepinfer_engine.pd.decode import DecodeService
from deepinfer_engine.pd.messages import (
    cached_body,
    pack_tokens,
    request_body,
    unpack_tokens,
    xid_body,
)
from deepinfer_engine.pd.peers import MAX_HANDSHAKES
from deepinfer_engine.pd.prefill import PrefillService
from deepinfer_engine.pd.sending import Outgoing
from deepinfer_engine.pd.wire import FrameType, Xid

TOKENS = prompt(1, 3 * BLOCK + 2)
SAMPLING = greedy(12, ignore_eos=True)
XID = Xid("r", 1)
LAYOUT_HASH = toy().layout.layout_hash


class Peer:
    """One connection to a worker, in a role."""

    def __init__(self, link):
        self.link = link

    @classmethod
    async def to(cls, worker, role):
        hello = identity(role, layout_hash=LAYOUT_HASH)
        return cls(await transport.connect(worker.address, hello, KEY))

    def send(self, kind, body):
        self.link.send(kind, body)

    async def next(self, *kinds):
        """The next frame of these kinds (heartbeats are passed over)."""
        while True:
            frame = await self.link.receive()
            assert frame is not None, "the worker closed the connection"
            if frame.type != FrameType.HEARTBEAT:
                assert frame.type in kinds, FrameType(frame.type).name
                return frame.body()

    def close(self):
        self.link.close()


@contextlib.asynccontextmanager
async def decode_worker(config=None, **runner_options):
    runner = toy(**runner_options)
    worker = await start_worker(DecodeService(runner, None, config or EngineConfig(), KEY))
    router, prefill = await Peer.to(worker, "router"), await Peer.to(worker, "prefill")
    try:
        yield worker, router, prefill
    finally:
        router.close()
        prefill.close()
        await worker.end()
    worker.service.loop.audit()
    assert worker.service.loop.unfinished == 0
    assert worker.service.loop.scheduler.pools.blocks.owned == 0


def reserve(worker, router, *, xid=XID, tokens=TOKENS, **changes):
    body = {
        **xid_body(xid),
        **request_body(request(xid.rid, tokens, SAMPLING)),
        "prompt_len": len(tokens),
        "layout_hash": LAYOUT_HASH,
        "epoch": worker.service.epoch,
    }
    router.send(FrameType.RESERVE, {**body, **changes})


class Computed:
    """What a prefill worker would have: the prompt's KV, its units and its COMMIT."""

    def __init__(self, grant_id, *, xid=XID, tokens=TOKENS):
        runner = toy()
        n_blocks = -(-len(tokens) // BLOCK)
        table = list(range(1, n_blocks + 1))
        chunk = PrefillChunk(
            token_ids=tokens,
            start=0,
            lookback=(),
            block_table=table,
            state_slot=1,
            sampling=SAMPLING,
            sample=True,
        )
        (output,) = runner.prefill([chunk])
        self.xid, self.tokens, self.first = xid, tokens, output.tokens[0]
        self.out = Outgoing(runner, grant_id, xid.attempt, len(tokens))
        list(self.out.blocks(table, n_blocks - 1))
        list(self.out.blocks(table, n_blocks))
        list(self.out.state(1))

    def unit(self, peer, n, *, flip=None):
        unit = self.out.units[n]
        data = bytearray(b"".join(unit.views))
        if flip is not None:
            data[flip] ^= 1
        peer.link.send_unit(unit.header, [memoryview(data)])

    def commit(self, peer, **changes):
        body = {
            **xid_body(self.xid),
            "n_units": len(self.out.units),
            "digest": self.out.digest,
            "tokens": pack_tokens(self.tokens),
            "first_token": self.first,
            "first_logprobs": [],
            "cached": cached_body(NOTHING),
        }
        peer.send(FrameType.COMMIT, {**body, **changes})


@pytest.mark.parametrize("ended", ["abort", "router"])
def test_what_decode_compiles_for_a_request_that_goes_is_given_up(ended):
    async def test():
        compiler = ToyCompiler()
        compiler.hold("tens")
        worker = await start_worker(DecodeService(toy(), None, EngineConfig(), KEY, compiler))
        router = await Peer.to(worker, "router")
        body = request_body(request("r", TOKENS, greedy(12, constraint=TENS)))
        reserve(worker, router, **body)
        await router.next(FrameType.RESERVED)
        await until(lambda: compiler.submitted)
        assert compiler.abandoned == []
        if ended == "abort":
            router.send(FrameType.ABORT, xid_body(XID))
            await router.next(FrameType.ABORT_ACK)
        else:
            router.close()
            await until(lambda: not worker.service.unfinished())
        for _ in range(5):  # turns of the loop, in which a cancelled task ends
            await asyncio.sleep(0)
        assert compiler.abandoned == ["tens"]
        router.close()
        await worker.end()

    run(test())


def test_decode_tells_prefill_what_the_first_token_may_be():
    async def test():
        compiler = ToyCompiler()
        compiler.hold("tens")
        worker = await start_worker(DecodeService(toy(), None, EngineConfig(), KEY, compiler))
        router, prefill = await Peer.to(worker, "router"), await Peer.to(worker, "prefill")
        grammar = ToyGrammar("tens")

        def asked(tokens, xid=XID):
            prefill.send(FrameType.MASK_WANTED, {**xid_body(xid), "tokens": pack_tokens(tokens)})

        async def told():
            return (await prefill.next(FrameType.MASK))["mask"]

        for constraint in (TENS, Constraint("no such", needed=False)):
            compiler.errors["no such"] = ConstraintError("no such type")
            xid = Xid(constraint.grammar, 1)
            body = request_body(request(xid.rid, TOKENS, greedy(12, constraint=constraint)))
            reserve(worker, router, xid=xid, **body)
            await router.next(FrameType.RESERVED)
        asked((), Xid("tens", 1))
        await until(lambda: worker.service._offers["tens#1"].asked)
        compiler.let_go("tens")
        assert await told() == mask_behind(grammar, "", ()).tobytes()
        asked((3, 9), Xid("tens", 1))  # a request that goes on where another worker was lost
        assert await told() == mask_behind(grammar, "", (3, 9)).tobytes()
        asked((), Xid("no such", 1))
        assert await told() is None, "nothing was promised"
        asked(())
        assert (await prefill.next(FrameType.GONE))["rid"] == XID.rid
        for peer in (router, prefill):
            peer.close()
        await worker.end()

    run(test())


async def whole_answer(router, first):
    tokens = [first]
    while True:
        body = await router.next(FrameType.TOKENS)
        assert body["index"] == len(tokens)
        tokens += unpack_tokens(body["tokens"])
        if "finish" in body:
            return tokens, body


def test_a_landed_prompt_is_decoded_to_the_same_tokens():
    async def body():
        async with decode_worker() as (worker, router, prefill):
            reserve(worker, router)
            computed = Computed((await router.next(FrameType.RESERVED))["grant_id"])
            for n in (2, 0, 1):  # any order
                computed.unit(prefill, n)
            computed.commit(prefill)
            await prefill.next(FrameType.RELEASED)
            ready = await router.next(FrameType.READY)
            assert ready["token"] == computed.first
            tokens, end = await whole_answer(router, computed.first)
            assert tokens == alone(TOKENS, SAMPLING)
            assert end["finish"] == "length"
            assert end["usage"]["completion_tokens"] == len(tokens)

    run(body())


def test_a_damaged_unit_is_sent_again_and_the_answer_is_right():
    async def body():
        async with decode_worker() as (worker, router, prefill):
            reserve(worker, router)
            computed = Computed((await router.next(FrameType.RESERVED))["grant_id"])
            computed.unit(prefill, 0, flip=11)
            computed.unit(prefill, 1)
            computed.unit(prefill, 2)
            computed.commit(prefill)
            assert (await prefill.next(FrameType.NACK))["unit"] == 0
            computed.unit(prefill, 0)
            await prefill.next(FrameType.RELEASED)
            await router.next(FrameType.READY)
            tokens, _ = await whole_answer(router, computed.first)
            assert tokens == alone(TOKENS, SAMPLING)

    run(body())


@pytest.mark.parametrize(
    "fault", ["duplicate", "damaged twice", "commit of others", "short commit"]
)
def test_a_broken_transfer_is_aborted_on_both_sides_and_never_runs(fault):
    async def body():
        async with decode_worker() as (worker, router, prefill):
            reserve(worker, router)
            computed = Computed((await router.next(FrameType.RESERVED))["grant_id"])
            computed.unit(prefill, 0)
            if fault == "duplicate":
                computed.unit(prefill, 0)
            elif fault == "damaged twice":
                computed.unit(prefill, 1, flip=0)
                await prefill.next(FrameType.NACK)
                computed.unit(prefill, 1, flip=0)
            elif fault == "commit of others":
                computed.unit(prefill, 1)
                computed.unit(prefill, 2)
                computed.commit(prefill, digest=1)
            else:
                computed.commit(prefill, n_units=1)
            assert (await prefill.next(FrameType.ABORT))["reason"] == "protocol"
            assert (await router.next(FrameType.ABORT))["reason"] == "protocol"
            computed.unit(prefill, 2)
            await prefill.next(FrameType.GONE)
            computed.commit(prefill)
            await prefill.next(FrameType.GONE)

    run(body())


def test_a_missing_unit_keeps_the_attempt_waiting_and_an_abort_frees_it():
    async def body():
        async with decode_worker() as (worker, router, prefill):
            reserve(worker, router)
            computed = Computed((await router.next(FrameType.RESERVED))["grant_id"])
            computed.unit(prefill, 0)
            computed.unit(prefill, 1)
            computed.commit(prefill)
            prefill.send(FrameType.STATUS, xid_body(XID))
            status = await prefill.next(FrameType.STATUS_REPLY)
            assert (status["state"], status["units_seen"]) == ("committed", 2)
            router.send(FrameType.ABORT, {**xid_body(XID), "reason": "client"})
            await router.next(FrameType.ABORT_ACK)
            assert worker.service.loop.scheduler.pools.blocks.owned == 0
            computed.unit(prefill, 2)
            await prefill.next(FrameType.GONE)

    run(body())


def test_a_prefill_that_goes_away_mid_transfer_frees_the_reservation():
    async def body():
        async with decode_worker() as (worker, router, prefill):
            reserve(worker, router)
            computed = Computed((await router.next(FrameType.RESERVED))["grant_id"])
            computed.unit(prefill, 0)
            await until(lambda: worker.service.landings.counters["transfer_units"] == 1)
            prefill.close()
            assert (await router.next(FrameType.ABORT))["reason"] == "prefill_lost"
            assert worker.service.loop.scheduler.pools.blocks.owned == 0

    run(body())


def test_a_router_that_goes_away_frees_reservations_and_running_sequences():
    async def body():
        async with decode_worker() as (worker, router, prefill):
            for rid in ("a", "b"):
                reserve(worker, router, xid=Xid(rid, 1))
            first = await router.next(FrameType.RESERVED)
            await router.next(FrameType.RESERVED)
            long = Computed(first["grant_id"], xid=Xid("a", 1))
            for n in range(3):
                long.unit(prefill, n)
            long.commit(prefill)
            await prefill.next(FrameType.RELEASED)
            router.close()
            await until(lambda: worker.service.loop.scheduler.pools.blocks.owned == 0)
            assert worker.service.unfinished() == 0

    run(body())


def test_an_abort_is_acknowledged_when_the_memory_is_free():
    async def body():
        async with decode_worker() as (worker, router, prefill):
            reserve(worker, router, **request_body(request("r", TOKENS, greedy(3000))))
            computed = Computed((await router.next(FrameType.RESERVED))["grant_id"])
            for n in range(3):
                computed.unit(prefill, n)
            computed.commit(prefill)
            await router.next(FrameType.READY)
            router.send(FrameType.ABORT, {**xid_body(XID), "reason": "client"})
            while True:
                body = await router.next(FrameType.TOKENS, FrameType.ABORT_ACK)
                if "tokens" not in body:
                    break
            assert worker.service.loop.scheduler.pools.blocks.owned == 0

    run(body())


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"layout_hash": "other"}, FrameType.ABORT, "layout"),
        ({"epoch": 1}, FrameType.STALE_EPOCH, None),
        ({"prompt_len": 5000}, FrameType.ABORT, "too_long"),
        ({"prompt_len": 2500}, FrameType.ABORT, "capacity"),
        ({"prompt_len": 0}, FrameType.ABORT, "request"),
    ],
)
def test_a_reservation_that_cannot_be_is_refused_when_it_is_asked_for(changes, kind, reason):
    async def body():
        async with decode_worker() as (worker, router, _):
            reserve(worker, router, **changes)
            assert (await router.next(kind)).get("reason") == reason

    run(body())


def test_reservations_beyond_the_queue_are_told_when_to_come_back():
    config = EngineConfig(max_num_seqs=1, max_queue=1)

    async def body():
        async with decode_worker(config) as (worker, router, _):
            for rid in ("runs", "waits", "refused"):
                reserve(worker, router, xid=Xid(rid, 1))
            assert (await router.next(FrameType.RESERVED))["rid"] == "runs"
            busy = await router.next(FrameType.BUSY)
            assert (busy["rid"], busy["reason"]) == ("refused", "full")
            assert busy["retry_after_ms"] > 0
            router.send(FrameType.ABORT, xid_body(Xid("runs", 1)))
            answers = [await router.next(FrameType.ABORT_ACK, FrameType.RESERVED) for _ in (1, 2)]
            assert {a["rid"] for a in answers} == {"runs", "waits"}

    run(body())


@pytest.mark.parametrize(
    ("role", "kind", "body"),
    [
        ("prefill", FrameType.RESERVED, {**xid_body(XID), "grant_id": 1, "epoch": 1}),
        ("router", FrameType.RELEASED, xid_body(XID)),
        ("router", FrameType.ABORT, {"rid": 5, "attempt": "x"}),
        ("router", FrameType.ABORT, {"attempt": 1}),
        ("router", FrameType.FLUSH, {"id": "x"}),
    ],
)
def test_a_peer_that_breaks_the_protocol_loses_its_connection_only(role, kind, body):
    async def test():
        async with decode_worker() as (worker, router, _):
            bad = await Peer.to(worker, role)
            bad.send(kind, body)
            while (frame := await bad.link.receive()) is not None:
                assert frame.type == FrameType.HEARTBEAT
            bad.close()
            reserve(worker, router)
            await router.next(FrameType.RESERVED)

    run(test())


SAMPLING_FAULTS = [
    {"logit_bias": [[10**7, 5.0]]},
    {"logit_bias": [[-5, 5.0]]},
    {"logit_bias": [[1, float("inf")]]},
    {"temperature": float("nan")},
    {"temperature": -1.0},
    {"temperature": "x"},
    {"top_k": 2**63},
    {"top_k": -7},
    {"top_p": 0.0},
    {"min_p": 2.0},
    {"seed": None},
    {"seed": 2**64 - 1},
    {"max_tokens": 0},
    {"min_tokens": 99},
    {"logprobs": 10**6},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": list(range(1000))},
    {"repetition_penalty": 0.0},
    {"constraint": {"grammar": 1, "prefix": "", "needed": True}},
    {"unknown": 1},
]
BODY_FAULTS = [
    {"resumed": 10_000},
    {"pictures": [[0, 1, 4, 2, b"short"]]},
    {"pictures": [[5, 9, 4, 2, bytes(32)], [3, 2, 4, 2, bytes(32)]]},
    {"salt": 5},
    {"unknown": 1},
]
TOKEN_FAULTS = [(1, -1, 3), (1, 2**31 - 1), (1, toy().caps.vocab_size), ()]


def with_sampling(fault):
    return {"sampling": {**request_body(request("r", TOKENS, SAMPLING))["sampling"], **fault}}


@pytest.mark.parametrize("fault", [*map(with_sampling, SAMPLING_FAULTS), *BODY_FAULTS])
def test_decode_refuses_a_request_that_could_end_it_and_that_request_alone(fault):
    async def test():
        async with decode_worker() as (worker, router, _):
            reserve(worker, router, xid=Xid("bad", 1), **fault)
            refused = await router.next(FrameType.ABORT)
            assert (refused["rid"], refused["reason"]) == ("bad", "request")
            reserve(worker, router)
            assert (await router.next(FrameType.RESERVED))["rid"] == "r"

    run(test())


@pytest.mark.parametrize(
    "fault",
    [
        *map(with_sampling, SAMPLING_FAULTS),
        *BODY_FAULTS,
        *({"tokens": pack_tokens(tokens)} for tokens in TOKEN_FAULTS),
        {"tokens": b"\1\2\3"},
        {"decode_address": "nowhere"},
    ],
)
def test_prefill_refuses_a_request_that_could_end_it_and_that_request_alone(fault):
    async def test():
        async with prefill_worker() as (_, router, ask):
            ask(rid="bad", **fault)
            refused = await router.next(FrameType.ABORT)
            assert (refused["rid"], refused["reason"]) == ("bad", "request")
            ask()
            told = await router.next(FrameType.FIRST, FrameType.ABORT)
            assert told["rid"] == "r"
            assert told.get("reason") in (None, "decode_lost")

    run(test())


@pytest.mark.parametrize(
    "fault",
    [
        {"n_units": "many"},
        {"first_token": 10**6},
        {"tokens": pack_tokens([10**6] * len(TOKENS))},
        {"tokens": b"\1\2\3"},
        {"tokens": b""},
        {"cached": {**cached_body(NOTHING), "cached_tokens": 10**6}},
        {"cached": {**cached_body(NOTHING), "replayed_tokens": 1}},
        {"cached": {**cached_body(NOTHING), "window": "elsewhere"}},
        {"more": 1},
    ],
)
def test_a_commit_with_a_bad_field_fails_its_request_and_no_other(fault):
    async def test():
        async with decode_worker() as (worker, router, prefill):
            reserve(worker, router)
            grant = (await router.next(FrameType.RESERVED))["grant_id"]
            computed = Computed(grant)
            for n in range(len(computed.out.units)):
                computed.unit(prefill, n)
            computed.commit(prefill, **fault)
            told = await router.next(FrameType.ABORT)
            assert (told["rid"], told["blame"]) == ("r", "prefill")
            await prefill.next(FrameType.ABORT)
            reserve(worker, router, xid=Xid("s", 1))
            assert (await router.next(FrameType.RESERVED))["rid"] == "s"

    run(test())


def test_an_unknown_frame_type_is_answered_and_ignored():
    async def body():
        async with decode_worker() as (worker, router, _):
            router.link._write(200, [b""])
            assert (await router.next(FrameType.UNSUPPORTED))["type"] == 200
            reserve(worker, router)
            await router.next(FrameType.RESERVED)

    run(body())


def test_a_reservation_that_nobody_commits_is_reaped_by_its_own_timer():
    async def body():
        async with decode_worker() as (worker, router, _):
            reserve(worker, router)
            await router.next(FrameType.RESERVED)
            (attempt,) = worker.service.landings
            worker.service._offers[attempt.xid.key].since -= 10_000.0
            assert (await router.next(FrameType.ABORT))["reason"] == "timeout"

    run(body())


# -- prefill ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def prefill_worker(decode_address="127.0.0.1:1", *, runner=None, **config):
    service = PrefillService(runner or toy(), None, EngineConfig(**config), KEY)
    worker = await start_worker(service)
    router = await Peer.to(worker, "router")

    def ask(**changes):
        router.send(
            FrameType.PREFILL,
            {
                **xid_body(XID),
                **request_body(request("r", TOKENS, SAMPLING)),
                "tokens": pack_tokens(TOKENS),
                "epoch": worker.service.epoch,
                "decode_address": decode_address,
                "decode_epoch": 5,
                "grant_id": 7,
                **changes,
            },
        )

    try:
        yield worker, router, ask
    finally:
        router.close()
        await worker.end()
    assert worker.service.unfinished() == 0
    worker.service.loop.audit()
    assert worker.service.loop.scheduler.pools.blocks.owned == 0


@contextlib.asynccontextmanager
async def silent_decode(mask=None):
    """A decode worker that takes everything and says nothing but this, when asked for a mask."""
    tasks = set()

    async def silent(peer):
        hello = identity("decode", layout_hash=LAYOUT_HASH)
        await transport.accept(peer, hello, KEY)
        while (frame := await peer.receive()) is not None:
            if frame.type == FrameType.MASK_WANTED and mask is not None:
                peer.send(FrameType.MASK, {**xid_body(XID), "mask": mask})
        peer.close()

    server = await transport.listen(
        "127.0.0.1", 0, lambda peer: tasks.add(asyncio.create_task(silent(peer)))
    )
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await asyncio.gather(*tasks)


def test_prefill_samples_what_decode_allows_and_gives_up_on_a_mask_that_does_not_fit():
    told = []

    async def test(mask):
        async with silent_decode(mask) as address, prefill_worker(address) as (_, router, ask):
            ask(**request_body(request("r", TOKENS, greedy(12, constraint=TENS))))
            kind = FrameType.FIRST if len(mask) == 4 * WORDS else FrameType.ABORT
            told.append(await router.next(kind))
            router.send(FrameType.ABORT, xid_body(XID))
            await router.next(FrameType.ABORT_ACK)

    only = np.zeros(WORDS, dtype="<i4")
    only[7] = 1 << 3
    run(test(only.tobytes()))
    run(test(b"1234"))
    first, refused = told
    assert unpack_tokens(first["tokens"]) == (7 * 32 + 3,)
    assert (refused["reason"], refused["blame"]) == ("decode_lost", "decode")
    assert "a mask of 4 bytes" in refused["message"]


def test_a_prompt_that_waits_for_its_mask_can_be_left():
    async def test():
        async with silent_decode() as address, prefill_worker(address) as (worker, router, ask):
            ask(**request_body(request("r", TOKENS, greedy(12, constraint=TENS))))
            await until(lambda: any(job.decode for job in worker.service._jobs.values()))
            router.send(FrameType.ABORT, xid_body(XID))
            await router.next(FrameType.ABORT_ACK)
            assert worker.service.unfinished() == 0

    run(test())


def test_prefill_tells_the_router_when_the_decode_worker_cannot_be_reached():
    async def body():
        async with prefill_worker() as (_, router, ask):
            ask()
            while True:
                told = await router.next(FrameType.FIRST, FrameType.ABORT)
                if "reason" in told:
                    break
            assert told["reason"] == "decode_lost"

    run(body())


def test_prefill_refuses_a_decode_worker_that_was_restarted_since_the_reservation():
    async def body():
        async with (
            decode_worker() as (decode, _, _),
            prefill_worker(decode.address) as (_, router, ask),
        ):
            ask()
            while True:
                told = await router.next(FrameType.FIRST, FrameType.ABORT)
                if "reason" in told:
                    break
            assert "restarted" in told["message"]

    run(body())


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"epoch": 1}, FrameType.STALE_EPOCH, None),
        ({"tokens": pack_tokens(prompt(1, 5000))}, FrameType.ABORT, "too_long"),
        ({"tokens": b""}, FrameType.ABORT, "request"),
    ],
)
def test_a_prompt_that_cannot_be_prefilled_is_refused(changes, kind, reason):
    async def body():
        async with prefill_worker() as (_, router, ask):
            ask(**changes)
            assert (await router.next(kind)).get("reason") == reason

    run(body())


def test_pixels_are_kept_until_their_prompt_an_abort_or_the_end_of_the_router():
    async def body():
        async with prefill_worker() as (worker, router, ask):
            pixels = worker.service._pixels

            def piece(rid, link=router):
                link.send(FrameType.PIXELS, {"rid": rid, "attempt": 1, "data": b"abc"})

            piece("r")
            piece("r")
            piece("gone")
            await until(lambda: len(pixels) == 2)
            assert bytes(pixels["r#1"].data) == b"abcabc"
            ask(epoch=1)
            await router.next(FrameType.STALE_EPOCH)
            router.send(FrameType.ABORT, xid_body(Xid("gone", 1)))
            await router.next(FrameType.ABORT_ACK)
            assert not worker.service._pixels
            other = await Peer.to(worker, "router")
            piece("left", other)
            piece("stays")
            await until(lambda: len(worker.service._pixels) == 2)
            other.close()
            await until(lambda: list(worker.service._pixels) == ["stays#1"])

    run(body())


@pytest.mark.parametrize("fault", ["other", "more", "none", "digest", "shape"])
def test_pixels_that_are_not_those_announced_end_their_request(fault):
    data = bytes(range(24))
    row = [0, 1, 4, 2, picture_digest(4, 2, data)]
    sent = {"other": bytes(24), "more": data + b"x", "none": b""}.get(fault, data)
    if fault == "digest":
        row[4] = b"short"
    if fault == "shape":
        row[2] = -4

    async def body():
        async with prefill_worker() as (worker, _, _):
            bad = await Peer.to(worker, "router")
            bad.send(FrameType.PIXELS, {**xid_body(XID), "data": sent})
            bad.send(
                FrameType.PREFILL,
                {
                    **xid_body(XID),
                    **request_body(request("r", TOKENS, SAMPLING)),
                    "pictures": [row],
                    "tokens": pack_tokens(TOKENS),
                    "epoch": worker.service.epoch,
                    "decode_address": "127.0.0.1:1",
                    "decode_epoch": 5,
                    "grant_id": 7,
                },
            )
            refused = await bad.next(FrameType.ABORT)
            assert (refused["rid"], refused["reason"]) == ("r", "request")
            bad.close()
            assert worker.service.unfinished() == 0

    run(body())


def test_a_model_without_a_tower_refuses_pictures_and_goes_on():
    data = bytes(24)

    async def body():
        async with prefill_worker() as (_, router, ask):
            router.send(FrameType.PIXELS, {**xid_body(XID), "data": data})
            ask(pictures=[[0, 1, 4, 2, picture_digest(4, 2, data)]])
            told = await router.next(FrameType.ABORT)
            assert told["reason"] == "request"
            assert "takes no pictures" in told["message"]

    run(body())


def test_more_pixels_than_a_request_may_have_end_the_connection(monkeypatch):
    monkeypatch.setattr("deepinfer_engine.pd.prefill.MAX_PIXEL_BYTES", 5)

    async def body():
        async with prefill_worker() as (worker, _, _):
            bad = await Peer.to(worker, "router")
            for data in (b"abc", b"def"):
                bad.send(FrameType.PIXELS, {**xid_body(XID), "data": data})
            while await bad.link.receive() is not None:
                pass
            bad.close()
            assert not worker.service._pixels

    run(body())


def test_aborts_are_heard_during_a_step_by_prompts_that_wait_and_by_the_one_that_runs():
    runner = gated()
    runner.gate.clear()

    async def body():
        async with (
            silent_decode() as address,
            prefill_worker(address, runner=runner, max_num_seqs=1) as (worker, router, ask),
        ):
            ask()
            await until(runner.entered.is_set)
            ask(rid="waits")
            await until(lambda: worker.service.unfinished() == 2)
            router.send(FrameType.ABORT, xid_body(Xid("waits", 1)))
            assert (await router.next(FrameType.ABORT_ACK))["rid"] == "waits"
            router.send(FrameType.ABORT, xid_body(XID))
            router.send(FrameType.STATUS, xid_body(XID))
            await router.next(FrameType.STATUS_REPLY)
            assert worker.service.loop.scheduler.pools.blocks.owned > 0, "the step uses it"
            runner.gate.set()
            assert (await router.next(FrameType.ABORT_ACK))["rid"] == "r"
            assert worker.service.loop.scheduler.pools.blocks.owned == 0

    run(body())


@pytest.mark.parametrize("arrives", ["as sent", "changed"])
def test_a_probe_tells_whether_bytes_arrive_as_they_were_sent(monkeypatch, arrives):
    digest = wire.unit_digest
    if arrives == "changed":
        monkeypatch.setattr(decode_module, "unit_digest", lambda views: digest(views) ^ 1)

    async def body():
        async with decode_worker() as (decode, _, _), prefill_worker() as (_, router, _):
            body = {"id": 9, "address": decode.address, "epoch": decode.service.epoch}
            router.send(FrameType.PROBE, body)
            told = await router.next(FrameType.PROBED)
            assert told["id"] == 9
            assert told["detail"] == ("" if arrives == "as sent" else "bytes arrive changed")

    run(body())


def test_strangers_that_never_say_who_they_are_push_each_other_out():
    async def body():
        async with decode_worker() as (worker, _, _):
            host, port = transport.parse_address(worker.address)
            many = range(2 * MAX_HANDSHAKES)
            strangers = [await asyncio.open_connection(host, port) for _ in many]
            await until(lambda: len(worker.service._handshakes) == MAX_HANDSHAKES)
            for reader, _ in strangers[:MAX_HANDSHAKES]:
                await reader.read()  # to the end: closed
            late = await Peer.to(worker, "router")
            reserve(worker, late)
            assert (await late.next(FrameType.RESERVED))["rid"] == "r"
            late.close()
            for _, writer in strangers:
                writer.close()

    run(body())


def test_an_abort_of_an_unknown_request_is_acknowledged():
    async def body():
        async with prefill_worker() as (_, router, _):
            router.send(FrameType.ABORT, xid_body(Xid("never heard of", 3)))
            await router.next(FrameType.ABORT_ACK)

    run(body())


def test_a_silent_decode_worker_does_not_keep_the_prompts_memory(monkeypatch):
    monkeypatch.setattr(prefill_module, "LEASE_S", 0.0)

    async def body():
        async with silent_decode() as address, prefill_worker(address) as (worker, router, ask):
            ask()
            await router.next(FrameType.FIRST)
            assert (await router.next(FrameType.ABORT))["reason"] == "lease"
            assert worker.service.loop.scheduler.pools.blocks.owned == 0

    run(body())


def test_a_worker_open_to_the_network_demands_a_cluster_key():
    async def body():
        service = DecodeService(toy(), None, EngineConfig(), None)
        with pytest.raises(ConfigError, match="cluster key"):
            await start_worker(service, "0.0.0.0:0")

    run(body())


def test_a_port_that_is_taken_is_a_configuration_error():
    async def body():
        async with decode_worker() as (worker, _, _):
            with pytest.raises(ConfigError, match="cannot listen"):
                await start_worker(DecodeService(toy(), None, EngineConfig(), KEY), worker.address)

    run(body())


def test_prefill_and_decode_with_other_cache_layouts_do_not_connect():
    async def body():
        async with (
            decode_worker(fingerprint="other") as (decode, _, _),
            prefill_worker(decode.address) as (prefill, _, _),
        ):
            with pytest.raises(TransferError, match="layouts"):
                await prefill.service._connect(decode.address)

    run(body())
