"""When a step counts as stuck: by the clock of the test."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.loops import engine_loop
from deepinfer_engine.core.toy_runner import ToyRunner
from deepinfer_engine.kv.parking import HostParking
from deepinfer_engine.pd.watchdog import LEAST_S, RUNAWAY_S, StepMonitor, Watchdog, thread_cpu_s


def test_a_step_without_a_sign_of_work_is_stuck_after_five_seconds():
    monitor = StepMonitor()
    assert monitor.trouble(100.0) == ""
    monitor.began(100.0)
    assert monitor.trouble(100.0 + LEAST_S) == ""
    assert "stood still for 6 s" in monitor.trouble(106.0)
    monitor.ended(106.0)
    assert monitor.trouble(200.0) == ""


def test_signs_of_work_keep_a_long_step_alive():
    monitor = StepMonitor()
    monitor.began(0.0)
    for now in range(1, 300):
        monitor.worked(float(now))
        assert monitor.trouble(now + 4.0) == ""
    assert "stood still" in monitor.trouble(299 + LEAST_S + 1)


def test_twenty_usual_steps_are_waited_for_where_steps_are_long():
    monitor = StepMonitor()
    now = 0.0
    for _ in range(100):
        monitor.began(now)
        now += 2.0
        monitor.ended(now)
    assert monitor.limit_s == pytest.approx(40.0, rel=0.01)
    monitor.began(now)
    assert monitor.trouble(now + 30) == ""
    assert monitor.trouble(now + 41)


def test_a_step_that_works_for_ever_is_stuck_too():
    monitor = StepMonitor()
    monitor.began(0.0)
    monitor.worked(RUNAWAY_S)
    assert monitor.trouble(RUNAWAY_S) == ""
    monitor.worked(RUNAWAY_S + 1)
    assert "has run for" in monitor.trouble(RUNAWAY_S + 1)


def test_a_sign_of_an_earlier_step_says_nothing_of_this_one():
    monitor = StepMonitor()
    monitor.began(0.0)
    monitor.worked(1.0)
    monitor.ended(2.0)
    monitor.began(3.0)
    assert monitor.trouble(3.0 + LEAST_S + 0.1)


class Stood:
    """A watchdog over a thread that the test holds where it wants."""

    def __init__(self, body) -> None:
        self.now = self.helpers_cpu_s = 0.0
        self.heard = []
        self.monitor = StepMonitor()
        self.thread = threading.Thread(target=body, daemon=True)
        self.dog = Watchdog(
            self.monitor,
            self.thread,
            told=self.heard.append,
            clock=lambda: self.now,
            helpers_cpu_s=lambda: self.helpers_cpu_s,
        )
        self.thread.start()

    def look(self, seconds: float) -> str:
        self.now += seconds
        self.dog.look()
        return self.heard[-1]


def test_a_thread_that_waits_for_a_lock_shows_no_work():
    held = threading.Event()
    it = Stood(held.wait)
    it.monitor.began(0.0)
    while it.dog._shows_work():
        pass  # it is on its way into the wait
    assert [bool(it.look(1.0)) for _ in range(8)] == [False] * 5 + [True] * 3
    held.set()
    it.thread.join()


def test_other_processes_that_compute_with_the_step_show_work():
    lock = threading.Lock()
    lock.acquire()
    stood = Stood(lambda: lock.acquire())
    stood.monitor.began(0.0)
    for _ in range(40):
        stood.helpers_cpu_s += 0.02
        assert stood.look(0.5) == ""
    told = [stood.look(0.5) for _ in range(14)]
    lock.release()
    assert "stood still" in told[-1]


def test_the_device_of_an_overlapped_loop_is_waited_for_while_it_works():
    runner = ToyRunner()
    parking = HostParking(runner, 1 << 20)
    options = {"parking": parking, "link": None, "sink": None}
    plain = engine_loop(runner, EngineConfig(), "both", **options)
    assert plain.waits_for == ()
    loop = engine_loop(runner, EngineConfig(overlap=True), "both", **options)
    (device,) = loop.waits_for
    try:
        assert device.is_alive()
        assert thread_cpu_s(device) >= 0.0
    finally:
        loop.close()
    assert not device.is_alive()


def test_the_processor_time_of_a_thread_is_its_own():
    go_on = threading.Event()
    thread = threading.Thread(target=lambda: (sum(range(3_000_000)), go_on.wait()), daemon=True)
    assert thread_cpu_s(thread) == 0.0
    thread.start()
    while thread_cpu_s(thread) < 0.001:
        pass  # it has begun to compute
    go_on.set()
    thread.join()
    assert thread_cpu_s(thread) >= 0.0  # it has ended: no error


AFTER_ITS_END = """
import os, threading, time
from deepinfer_engine.pd.watchdog import StepMonitor, Watchdog

over = threading.Event()
threads = [threading.Thread(target=over.wait) for _ in range(20)]
threading.stack_size(64 << 20)  # more than the system keeps: their ends unmap one another's
for thread in threads:
    thread.start()
over.set()
for thread in threads:
    thread.join()
while any(os.path.exists(f"/proc/self/task/{thread.native_id}") for thread in threads):
    time.sleep(0.01)
for thread in threads:
    Watchdog(StepMonitor(), thread, told=lambda trouble: None).look()
"""


def test_a_thread_that_has_ended_can_be_looked_at():
    """In a process of its own: what is wrong here is a crash."""
    done = subprocess.run([sys.executable, "-c", AFTER_ITS_END], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_thread_that_computes_shows_work():
    stop = threading.Event()

    def compute():
        while not stop.is_set():
            sum(range(1000))

    it = Stood(compute)
    it.monitor.began(0.0)
    for _ in range(20):
        seen = False
        while not seen:  # until the machine has given the thread some time
            seen = it.dog._shows_work()
        it.monitor.worked(it.now)
        it.now += 1.0
        assert it.monitor.trouble(it.now) == ""
    stop.set()
    it.thread.join()


def test_a_process_that_was_stopped_and_goes_on_is_not_stuck():
    held = threading.Event()
    it = Stood(held.wait)
    it.monitor.began(0.0)
    while it.dog._shows_work():
        pass
    it.look(1.0)
    assert it.look(3600.0) == ""
    assert [bool(it.look(1.0)) for _ in range(7)][-1]
    held.set()
    it.thread.join()
