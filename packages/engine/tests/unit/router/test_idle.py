"""Links between router and workers that nobody uses for hours."""

from __future__ import annotations

import asyncio

from idle_clock import IdleClock
from toy_engine import alone, ask, cluster, greedy, prompt, request, until

from deepinfer_engine.pd.transport import Connection
from deepinfer_engine.router.link import SILENT_S

HOURS = 2.0


def count_losses(monkeypatch) -> list[str]:
    """Names of the peers of connections that ended, as they end."""
    closed: list[str] = []
    lost = Connection.connection_lost

    def noted(self, exc):
        closed.append(self.name)
        lost(self, exc)

    monkeypatch.setattr(Connection, "connection_lost", noted)
    return closed


def test_a_worker_without_a_heartbeat_is_given_up_and_connected_anew(monkeypatch):
    clock = IdleClock(monkeypatch)
    closed = count_losses(monkeypatch)

    async def body():
        async with cluster() as it:
            link = next(link for link in it.engine._links.values() if link.role == "decode")
            before = link.connection
            beats = it.decodes[0].service._beat
            monkeypatch.setattr(it.decodes[0].service, "_beat", lambda peer: None)
            await clock.pass_idly(3 * SILENT_S)
            assert closed
            monkeypatch.setattr(it.decodes[0].service, "_beat", beats)
            await until(lambda: link.ready and link.connection is not before)

    with asyncio.Runner(loop_factory=clock.new_loop) as runner:
        runner.run(body())


def test_idle_hours_cost_no_link_and_the_next_request_is_served_at_once(monkeypatch):
    clock = IdleClock(monkeypatch)
    closed = count_losses(monkeypatch)

    async def body():
        async with cluster() as it:
            links = list(it.engine._links.values())
            for number in range(4):
                tokens = prompt(number, 20)
                assert (await ask(it.engine, request(f"a{number}", tokens))).tokens == alone(
                    tokens, greedy()
                )
            connections = [link.connection for link in links]
            peers = [set(worker.service.peers) for worker in it.workers]
            began = clock()
            await clock.pass_idly(HOURS * 3600)
            assert clock() - began >= HOURS * 3600
            assert closed == []
            assert [link.connection for link in links] == connections
            assert [set(worker.service.peers) for worker in it.workers] == peers
            assert all(status.ready for status in await it.engine.status())
            assert await it.engine.problems() == []
            for number in range(4):
                tokens = prompt(number + 10, 20)
                answer = await ask(it.engine, request(f"b{number}", tokens))
                assert answer.tokens == alone(tokens, greedy())
            assert sum(link.failures for link in links) == 0
            assert closed == []

    with asyncio.Runner(loop_factory=clock.new_loop) as runner:
        runner.run(body())
