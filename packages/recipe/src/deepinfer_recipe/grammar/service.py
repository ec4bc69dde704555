"""Compiling what clients send: in processes that can be killed, with a bounded memory of results.

A schema of a kilobyte can keep a compiler busy for minutes or fill the memory of a machine, and a
thread cannot be stopped. So each grammar is first compiled in a child process under a limit of
time and memory; what was compiled there within the limits is compiled again here, in a thread. A
child that has nothing to do for a while is ended: it holds the library and the vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from deepinfer_recipe.base.errors import (
    GrammarBusy,
    GrammarError,
    GrammarTooComplex,
    GrammarUnavailable,
)
from deepinfer_recipe.grammar.worker import read_message, write_bytes, write_message

if TYPE_CHECKING:
    from deepinfer_recipe.grammar.compile import CompiledGrammar, GrammarVocabulary

_START_S = 120.0
_ALARM_GRACE_S = 5.0
_IDLE_S = 60.0
_PASSED_ON = (
    "PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "LC_ALL",
)  # fmt: skip
"""What a compiler needs of the environment; keys and tokens are no business of its."""


class GrammarService:
    """Compiles grammars for one vocabulary. Thread-safe; processes start on first use."""

    def __init__(
        self,
        vocabulary: Callable[[], GrammarVocabulary],
        *,
        timeout_s: float = 20.0,
        cache_bytes: int = 256 << 20,
        memory_bytes: int = 512 << 20,
        processes: int = 2,
        max_waiting: int = 64,
        idle_s: float = _IDLE_S,
    ) -> None:
        """Nothing is loaded or started before the first grammar.

        vocabulary: makes the vocabulary; called once, from another thread.
        timeout_s: longest time to compile one grammar.
        cache_bytes: memory for results kept; the least recently used go first.
        memory_bytes: how far one compiler's memory may grow.
        max_waiting: grammars that may wait or compile at a time.
        idle_s: how long a compiler without work is kept.

        Raises `GrammarUnavailable` if xgrammar is not installed.
        """
        if importlib.util.find_spec("xgrammar") is None:
            raise GrammarUnavailable(
                "enforcing output constraints needs xgrammar: "
                'pip install "./packages/recipe[grammar]"'
            )
        self._make_vocabulary = vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._max_waiting = max_waiting
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._cache = _Cache(cache_bytes)
        self._pending: dict[str, Future[CompiledGrammar]] = {}
        self._counters: Counter[str] = Counter()
        self._own = threading.local()
        self._compilers: set[_Compiler] = set()
        self._working: dict[str, _Compiler] = {}
        """The process that compiles a text now."""
        self._abandoned: set[str] = set()
        self._closed = False
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="grammar")

    def submit(self, text: str) -> Future[CompiledGrammar]:
        """Compile a structural tag; one text is compiled once, however many ask for it.

        The future raises `GrammarError` for a text that is no grammar and `GrammarTooComplex`
        beyond the limits; both are remembered like results. Raises `GrammarBusy` when too many
        wait.
        """
        with self._lock:
            if self._closed:
                raise GrammarBusy("the grammar compiler has been closed")
            known = self._cache.get(text)
            if known is not None:
                self._counters["grammar_cache_hits"] += 1
                return known
            running = self._pending.get(text)
            if running is not None:
                return running
            if len(self._pending) >= self._max_waiting:
                raise GrammarBusy(
                    f"{len(self._pending)} grammars are being compiled or wait; try again"
                )
            future = self._threads.submit(self._compile, text)
            self._pending[text] = future
        future.add_done_callback(lambda done: self._settle(text, done))
        return future

    def abandon(self, text: str) -> None:
        """Nobody wants this text any more: one that waits is left out, one that compiles is killed.

        Its future is cancelled or raises `GrammarBusy`; nothing is remembered of it.
        """
        with self._lock:
            future = self._pending.get(text)
            if future is None or future.done():
                return
            compiler = self._working.get(text)
            if compiler is None:
                waits = future
            else:
                # Under the lock: its thread takes that before it gives it another text.
                self._abandoned.add(text)
                compiler.kill()
                return
        waits.cancel()

    def compile(self, text: str) -> CompiledGrammar:
        """`submit`, waited for."""
        return self.submit(text).result()

    def counters(self) -> dict[str, float]:
        """How often what happened: compilations, cache hits, failures, timeouts."""
        with self._lock:
            names = ("compilations", "cache_hits", "failures", "timeouts")
            return {name: self._counters[name] for name in (f"grammar_{n}" for n in names)}

    def gauges(self) -> dict[str, float]:
        """What is there now: grammars that compile or wait, bytes of the cache."""
        with self._lock:
            return {
                "grammar_queue": len(self._pending),
                "grammar_cache_bytes": self._cache.used_bytes,
            }

    def close(self) -> None:
        """Kill the compilers; what still compiles fails. Harmless twice."""
        with self._lock:
            self._closed = True
            compilers = list(self._compilers)
        for compiler in compilers:
            compiler.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    # -- in a thread of the pool ----------------------------------------------------------------

    def _compile(self, text: str) -> CompiledGrammar:
        from deepinfer_recipe.grammar.compile import compile_grammar

        with self._lock:
            self._counters["grammar_compilations"] += 1
        vocabulary = self._known_vocabulary()
        ahead = self._tried_out(text, vocabulary)
        return compile_grammar(text, vocabulary, ahead=ahead)

    def _tried_out(self, text: str, vocabulary: GrammarVocabulary) -> bool:
        """Compile in a process; whether masks must be made ahead. Raises `GrammarError`s."""
        compiler = self._taken(text, vocabulary)
        message = {"grammar": text, "alarm_s": self._timeout_s + _ALARM_GRACE_S}
        answer = compiler.ask(message, self._timeout_s)
        with self._lock:
            del self._working[text]
            abandoned = text in self._abandoned
            self._abandoned.discard(text)
            if not self._closed:
                compiler.rest(self._idle_s, self._retire)
        if answer is None:
            self._drop(compiler)
            if self._closed:
                raise GrammarBusy("the grammar compiler was closed meanwhile")
            if abandoned:
                raise GrammarBusy("nobody waited for this schema any more; send it again")
            if compiler.timed_out:
                with self._lock:
                    self._counters["grammar_timeouts"] += 1
                raise GrammarTooComplex(
                    f"the schema takes longer than {self._timeout_s:g} s to compile; make it "
                    "smaller, or nest alternatives less deeply"
                )
            raise GrammarTooComplex(
                "the schema takes more memory to compile than is allowed; make it smaller"
            )
        if "invalid" in answer:
            raise GrammarError(answer["invalid"])
        return bool(answer["ahead"])

    def _known_vocabulary(self) -> GrammarVocabulary:
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _taken(self, text: str, vocabulary: GrammarVocabulary) -> _Compiler:
        """This thread's process, which works on `text` from now on; started if there is none."""
        compiler: _Compiler | None = getattr(self._own, "compiler", None)
        if compiler is not None and compiler.alive:
            with self._lock:
                if compiler in self._compilers:  # not retired since
                    self._working[text] = compiler
                    compiler.wake()
                    return compiler
        compiler = self._started(vocabulary)
        with self._lock:
            self._working[text] = compiler
        return compiler

    def _started(self, vocabulary: GrammarVocabulary) -> _Compiler:
        compiler = _Compiler()
        with self._lock:
            self._compilers.add(compiler)
            closed = self._closed
        if closed:
            compiler.kill()
        self._own.compiler = compiler
        answer = compiler.ask(
            {"memory_bytes": self._memory_bytes}, _START_S, then=vocabulary.serialize()
        )
        if answer is None or "unavailable" in answer:
            self._drop(compiler)
            raise GrammarUnavailable(
                "the grammar compiler does not start: "
                + ("it ended" if answer is None else str(answer["unavailable"]))
            )
        return compiler

    def _retire(self, compiler: _Compiler) -> None:
        """End a process that had no work for a while; another is started when there is some."""
        with self._lock:
            if compiler in self._working.values():
                return
            self._compilers.discard(compiler)
        compiler.kill()

    def _drop(self, compiler: _Compiler) -> None:
        compiler.kill()
        self._own.compiler = None
        with self._lock:
            self._compilers.discard(compiler)

    def _settle(self, text: str, done: Future[CompiledGrammar]) -> None:
        with self._lock:
            self._pending.pop(text, None)
            if done.cancelled():
                return
            error = done.exception()
            if error is not None:
                self._counters["grammar_failures"] += 1
            if error is None or isinstance(error, GrammarError):
                self._cache.put(text, done)


class _Cache:
    """Results by text, the least recently used going first. The service holds the lock.

    A grammar grows while answers are walked, so sizes are taken again whenever one is asked for
    or comes in.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return sum(_size(text, future) for text, future in self._entries.items())

    def get(self, text: str) -> Future[CompiledGrammar] | None:
        future = self._entries.get(text)
        if future is not None:
            self._entries.move_to_end(text)
            self._make_room()
        return future

    def put(self, text: str, future: Future[CompiledGrammar]) -> None:
        self._entries[text] = future
        self._make_room()

    def _make_room(self) -> None:
        used = self.used_bytes
        while used > self._limit:
            used -= _size(*self._entries.popitem(last=False))


def _size(text: str, done: Future[CompiledGrammar]) -> int:
    return len(text) + (done.result().nbytes if done.exception() is None else 0)


class _Compiler:
    """One child process; used by one thread at a time, killed by any."""

    def __init__(self) -> None:
        environ = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "deepinfer_recipe.grammar.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environ, "OMP_NUM_THREADS": "1"},
            # Ctrl-C in a terminal signals the whole group; the parent decides on its own end.
            start_new_session=True,
        )
        self.timed_out = False
        self._idle: threading.Timer | None = None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self, message: dict[str, Any], timeout_s: float, *, then: bytes | None = None
    ) -> dict[str, Any] | None:
        """One exchange, `then` going behind the message.

        None if the process ended, of itself or at the end of its time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        clock = threading.Timer(timeout_s, self._expire)
        clock.daemon = True
        clock.start()
        try:
            write_message(self._process.stdin, message)
            if then is not None:
                write_bytes(self._process.stdin, then)
            return read_message(self._process.stdout)
        except OSError:
            return None
        except ValueError:
            if not self._process.stdin.closed:
                raise
            return None  # killed by another thread before a byte of the message was written
        finally:
            clock.cancel()

    def _expire(self) -> None:
        self.timed_out = True
        self._process.kill()

    def rest(self, seconds: float, retire: Callable[[_Compiler], None]) -> None:
        """Have `retire` called when that much time has passed without work."""
        self._idle = threading.Timer(seconds, retire, (self,))
        self._idle.daemon = True
        self._idle.start()

    def wake(self) -> None:
        """There is work."""
        if self._idle is not None:
            self._idle.cancel()

    def kill(self) -> None:
        """End the process, whatever it does, and reap it."""
        self.wake()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not written has no reader any more
                    pipe.close()
