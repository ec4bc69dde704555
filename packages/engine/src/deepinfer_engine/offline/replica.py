"""A rank of `LLM(dp=...)` other than the first: `python -m deepinfer_engine.offline.replica`.

For each message of the first rank it takes requests in, runs one step of the group and answers with
what its requests said. It ends with the first rank.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import torch

from deepinfer_engine.core.loop import EngineLoop
from deepinfer_engine.core.plan import Chunk, Progress
from deepinfer_engine.core.types import GenerateRequest, SamplingParams
from deepinfer_engine.core.votes import Vote
from deepinfer_engine.core.voting_loop import VotingLoop
from deepinfer_engine.errors import EngineError
from deepinfer_engine.kv.connector import KVConnector
from deepinfer_engine.offline.build import EngineSpec, build_engine
from deepinfer_engine.parallel.ballot import GlooBallot
from deepinfer_engine.parallel.channel import Channel
from deepinfer_engine.parallel.member import opened
from deepinfer_engine.parallel.messages import Setup
from deepinfer_engine.parallel.replica import ReplicaSeat

REPORT_S = 0.25
"""Seconds between two reports of a rank that works."""


def request_body(request: GenerateRequest) -> dict[str, Any]:
    """A request that has neither pictures nor a grammar, as values of msgpack."""
    return {
        "id": request.request_id,
        "tokens": list(request.token_ids),
        "salt": request.salt,
        "sampling": dataclasses.asdict(request.sampling),
    }


def read_request(body: dict[str, Any]) -> GenerateRequest:
    """The inverse of `request_body`."""
    sampling = dict(body["sampling"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    sampling["logit_bias"] = tuple((t, float(b)) for t, b in sampling["logit_bias"])
    return GenerateRequest(
        body["id"], tuple(body["tokens"]), SamplingParams(**sampling), salt=body["salt"]
    )


class Collector:
    """The loop's sink: what a step made, until the first rank is told."""

    def __init__(self) -> None:
        self._made: list[list[Any]] = []

    def chunk_done(self, chunk: Chunk) -> None:
        """Prompts are read and continued in one memory."""

    def progress(self, progress: Progress) -> None:
        usage = None if progress.finish is None else dataclasses.asdict(progress.seq.usage())
        said = [[one.token, one.logprob, list(one.top)] for one in progress.logprobs]
        seq, tokens = progress.seq, list(progress.tokens)
        self._made.append([seq.key, progress.index, tokens, said, progress.finish, usage])

    def take(self) -> list[list[Any]]:
        made, self._made = self._made, []
        return made


def main() -> None:
    """Load, join, step until the first rank closes the pipe."""
    begun = opened()
    if begun is None:
        return
    channel, body = begun
    setup = Setup.read(body)
    torch.set_num_threads(setup.threads)
    sink, spec = Collector(), EngineSpec.read(body["spec"])
    try:
        _, connector, loop = build_engine(
            spec,
            VotingLoop,
            ReplicaSeat(setup, channel),
            sink=sink,
            ballot=GlooBallot(),
            vote=Vote(setup.size, spec.vote_policy),
        )
        serve(loop, sink, channel, Reporter(loop, connector))
    except EngineError as error:
        channel.send({"failed": str(error), "kind": type(error).__name__})
        sys.exit(1)


class Reporter:
    """What this rank tells of itself: now and then, and at once when it has nothing left to do."""

    def __init__(self, loop: EngineLoop, connector: KVConnector | None) -> None:
        self._loop, self._connector = loop, connector
        self._busy, self._next = True, 0.0

    def due(self, now: float) -> tuple[dict[str, float], dict[str, float]] | None:
        """Counters and gauges, where it is time."""
        was_busy, self._busy = self._busy, self._loop.unfinished > 0
        if now < self._next and (self._busy or not was_busy):
            return None
        self._next = now + REPORT_S
        counters, gauges = self._loop.snapshot()
        if self._connector is not None:
            counters |= self._connector.counters()
            gauges |= self._connector.gauges()
        return counters, gauges


def serve(loop: EngineLoop, sink: Collector, channel: Channel, reporter: Reporter) -> None:
    """One step for each message."""
    while (body := channel.receive()) is not None:
        for asked in body["submit"]:
            request = read_request(asked)
            loop.submit(request, request.request_id, time.monotonic())
        for key in body["abort"]:
            loop.abort(key)
        loop.step(time.monotonic())
        channel.send({"made": sink.take(), "report": reporter.due(time.monotonic())})


if __name__ == "__main__":
    main()
