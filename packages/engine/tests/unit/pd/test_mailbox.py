"""Calls for an event loop: in order, together, and none lost."""

from __future__ import annotations

import asyncio
import threading

from deepinfer_engine.pd.mailbox import Mailbox


class Counting:
    """An event loop's part that a mailbox uses."""

    def __init__(self, loop):
        self.loop, self.woken = loop, 0

    def call_soon_threadsafe(self, call):
        self.woken += 1
        self.loop.call_soon_threadsafe(call)

    def call_exception_handler(self, context):
        self.loop.call_exception_handler(context)


def test_output_of_many_streams_wakes_the_loop_once():
    async def body():
        counting = Counting(asyncio.get_running_loop())
        mailbox = Mailbox(counting)  # type: ignore[arg-type]
        got: list[int] = []
        for n in range(256):  # the loop is busy with this function: nothing is delivered yet
            mailbox.post(got.append, n)
        await asyncio.sleep(0)
        assert got == list(range(256))
        assert counting.woken == 1
        mailbox.post(got.append, 256)
        await asyncio.sleep(0)
        assert (got[-1], counting.woken) == (256, 2)

    asyncio.run(body())


def test_posts_of_many_threads_all_arrive():
    async def body():
        mailbox = Mailbox(asyncio.get_running_loop())
        got: list[tuple[int, int]] = []
        threads = [
            threading.Thread(
                target=lambda t=t: [mailbox.post(got.append, (t, n)) for n in range(500)]
            )
            for t in range(4)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or len(got) < 2000:
            await asyncio.sleep(0)
        for t in range(4):
            assert [n for who, n in got if who == t] == list(range(500))

    asyncio.run(body())


def test_a_call_that_fails_is_told_and_the_others_are_made():
    async def body():
        told: list[dict] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context))
        mailbox = Mailbox(loop)
        got: list[int] = []
        mailbox.post(got.append, 1)
        mailbox.post(int, "no number")
        mailbox.post(got.append, 2)
        await asyncio.sleep(0)
        assert got == [1, 2]
        assert [type(context["exception"]) for context in told] == [ValueError]

    asyncio.run(body())


def test_a_loop_that_is_closed_hears_nothing_and_nobody_is_hurt():
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    mailbox.post(print, "never")
    mailbox.post(print, "never")
