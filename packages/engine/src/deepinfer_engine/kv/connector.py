"""Between the loop and a prefix store: loads before a prompt runs, publications after a step.

Lookups with their loads, and publications, have threads of their own, so that neither a slow disk,
a distant peer nor a full queue holds a step. A load that fails becomes a shorter hit; a publication
that finds too many bytes in flight is dropped and counted. Nothing here raises into the loop.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from deepinfer_engine.core.block_hashes import CacheChange
from deepinfer_engine.core.loop import LoadedCallback
from deepinfer_engine.core.prefix_store import BorderState, Hit, PrefixBlocks, PrefixStore
from deepinfer_engine.core.runner import StepRunner
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.windows import NOTHING, PersistState, Prefix

log = logging.getLogger(__name__)

MAX_BYTES_IN_FLIGHT = 256 << 20
MAX_UNSETTLED = 32
LOADS_AT_ONCE = 2
"""A prompt whose windows come from a slow peer must not keep the next one waiting."""


class KVConnector:
    """`core.loop.PrefixLink` on a `PrefixStore`; owns it and its threads until `close`.

    persist_state: which window states go below memory.
    """

    def __init__(
        self,
        store: PrefixStore,
        runner: StepRunner,
        *,
        max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
        persist_state: PersistState = "last",
    ) -> None:
        self._store = store
        self._runner = runner
        self._limit = max_bytes_in_flight
        self._persist: PersistState = persist_state
        self._loader = ThreadPoolExecutor(LOADS_AT_ONCE, "kv-load")
        self._publisher = ThreadPoolExecutor(1, "kv-publish")
        self._lock = threading.Lock()
        self._in_flight = 0
        self._unsettled: list[tuple[Callable[[], None], int]] = []
        """Puts that were handed over but may not be findable yet; the publishing thread's own."""
        self._counters: Counter[str] = Counter()
        self.on_hit: Callable[[LiveSequence, Prefix], None] = lambda seq, prefix: None
        """Hears, on a loading thread, what is cached of a prompt before it runs."""

    # -- loads ----------------------------------------------------------------------------------

    def look_up(self, seq: LiveSequence, loaded: LoadedCallback) -> bool:
        self._loader.submit(self._look_up, seq, loaded)
        return True

    def _look_up(self, seq: LiveSequence, loaded: LoadedCallback) -> None:
        try:
            prefix = self._load(seq, self._match(seq, None))
        except Exception:
            log.exception("the prefix of %s could not be loaded; it is recomputed", seq.key)
            self._count(prefix_errors=1)
            prefix = NOTHING
        self._count(prefix_miss_tokens=seq.prompt_len - prefix.n_tokens)
        self.on_hit(seq, prefix)
        loaded(seq, prefix)

    def load_blocks(
        self, wanted: PrefixBlocks, views: Sequence[memoryview], loaded: Callable[[int], None]
    ) -> None:
        """Fill the views; `loaded` hears on another thread how many leading ones are good."""
        self._loader.submit(self._load_blocks, wanted, views, loaded)

    def _load_blocks(
        self, wanted: PrefixBlocks, views: Sequence[memoryview], loaded: Callable[[int], None]
    ) -> None:
        size, good = self._runner.layout.block_tokens, 0
        try:
            hit = self._store.match_blocks(wanted)
            if hit is not None:
                try:
                    found = views[: hit.n_tokens // size]
                    good = self._store.load(hit, found, memoryview(b"")).n_tokens // size
                finally:
                    self._store.release(hit)
        except Exception:
            log.exception("stored blocks could not be loaded; they are sent")
            self._count(prefix_errors=1)
        loaded(good)

    def _match(self, seq: LiveSequence, limit_tokens: int | None) -> Hit | None:
        try:
            return self._store.match(
                seq.tokens[: seq.prompt_len],
                seq.request.salt,
                limit_tokens=limit_tokens,
                pictures=seq.request.pictures,
            )
        except Exception:
            log.exception("prefix lookup failed; %s runs without a cache", seq.key)
            self._count(prefix_errors=1)
            return None

    def _load(self, seq: LiveSequence, hit: Hit | None) -> Prefix:
        """The longest part of a hit that can be had, in the sequence's memory."""
        size = self._runner.layout.block_tokens
        while hit is not None:
            try:
                found, good = self._bring(seq, hit)
            finally:
                self._store.release(hit)
            if found is not None:
                return self._in_place(seq, found)
            self._count(prefix_short_loads=1)
            # Blocks may be good while the state is not: then the hit is one block shorter.
            limit = min(good, hit.n_tokens - size)
            hit = self._match(seq, limit) if limit > 0 else None
        return NOTHING

    def _bring(self, seq: LiveSequence, hit: Hit) -> tuple[Hit | None, int]:
        """(the hit as it turned out, None where it fell short; how many tokens are good)."""
        if not hit.n_tokens:
            return hit, 0
        good, state = self._load_once(seq, hit)
        if good < hit.n_tokens:
            return None, good
        return (self._store.without_state(hit) if hit.loads_state and not state else hit), good

    def _in_place(self, seq: LiveSequence, hit: Hit) -> Prefix:
        start = hit.n_tokens
        if hit.window == "bounded_replay":
            start = max(0, start - self._runner.caps.window)
        elif hit.window == "exact_replay":
            start = self._runner.caps.replay_start(start, seq.prompt_len)
        if start == 0:
            self._count(window_miss=1)
            return Prefix(window="miss")
        if hit.window is not None:
            self._count(**{f"window_{hit.window}": 1})
        for tier, blocks in hit.blocks_by_tier.items():
            tokens = blocks * self._runner.layout.block_tokens
            self._count(**{f"prefix_hit_tokens_{tier}": tokens})
        return Prefix(hit.n_tokens, start, hit.window, hit.generation)

    def _load_once(self, seq: LiveSequence, hit: Hit) -> tuple[int, bool]:
        n_blocks = hit.n_tokens // self._runner.layout.block_tokens
        blocks = [self._runner.block_bytes(b) for b in seq.blocks[:n_blocks]]
        try:
            loaded = self._store.load(hit, blocks, self._runner.state_bytes(seq.state_slot))
        except Exception:
            log.exception("loading a prefix failed; %s recomputes it", seq.key)
            self._count(prefix_errors=1)
            return 0, False
        return loaded.n_tokens, loaded.state

    # -- publications ---------------------------------------------------------------------------

    def publish(
        self,
        seq: LiveSequence,
        blocks: Sequence[tuple[int, int]],
        states: Sequence[tuple[int, int]],
    ) -> None:
        layout = self._runner.layout
        copies = [(p, bytes(self._runner.state_bytes(slot))) for p, slot in states]
        kept = [(p, data, self._persists(seq, p)) for p, data in copies]
        if self._persist == "last":
            kept += self._last_of_answer(seq, copies)
        size = len(blocks) * layout.block_bytes + len(kept) * layout.state_bytes
        with self._lock:
            if self._in_flight + size > self._limit:
                self._counters["prefix_dropped_bytes"] += size
                return
            self._in_flight += size
        block_copies = [bytes(self._runner.block_bytes(block_id)) for _, block_id in blocks]
        first = blocks[0][0] if blocks else 0
        ends = [p for p, _, _ in kept] + [(i + 1) * layout.block_tokens for i, _ in blocks]
        if not ends:
            return
        tokens = tuple(seq.tokens[: max(ends)])
        self._publisher.submit(self._put, seq, tokens, first, block_copies, kept, size)

    def _persists(self, seq: LiveSequence, position: int) -> bool:
        size = self._runner.layout.block_tokens
        # Asked again, the same prompt must hit: its last token is always computed.
        last = position == (seq.prompt_len - 1) // size * size
        return self._persist == "all" or (self._persist == "last" and last)

    def _last_of_answer(
        self, seq: LiveSequence, states: Sequence[tuple[int, bytes]]
    ) -> list[tuple[int, bytes, bool]]:
        """The state at the last border an answer has passed, when it has ended: until then it is
        not known to be the last."""
        behind = [state for state in states if state[0] > seq.prompt_len]
        if behind:
            seq.border_state = behind[-1]
        if seq.finish_reason is None or seq.border_state is None:
            return []
        position, data = seq.border_state
        seq.border_state = None
        return [(position, data, True)]

    def _put(
        self,
        seq: LiveSequence,
        tokens: tuple[int, ...],
        first: int,
        blocks: list[bytes],
        states: list[tuple[int, bytes, bool]],
        size: int,
    ) -> None:
        findable: Callable[[], None] = _at_once
        try:
            findable = self._store.put(
                tokens,
                seq.request.salt,
                first,
                [memoryview(b) for b in blocks],
                [BorderState(p, memoryview(data), persist) for p, data, persist in states],
                seq.request.traffic_class,
                seq.request.pictures,
                seq.prefix.generation,
            )
            persisted = sum(persist for _, _, persist in states)
            self._count(
                prefix_put_blocks=len(blocks),
                prefix_put_states=persisted,
                windows_kept=len(states),
            )
        except Exception:
            log.exception("publishing a prefix failed; it will be recomputed when asked again")
            self._count(prefix_errors=1)
        self._unsettled.append((findable, size))
        if len(self._unsettled) >= MAX_UNSETTLED or self._in_flight > self._limit // 2:
            self._settle()

    def _settle(self) -> None:
        """Wait for all puts together: the store writes them in groups."""
        for findable, size in self._unsettled:
            try:
                findable()
            except Exception:
                log.exception("a publication failed after it was handed over")
                self._count(prefix_errors=1)
            with self._lock:
                self._in_flight -= size
        self._unsettled.clear()

    def after_publications(self, call: Callable[[], None]) -> None:
        """Call `call` on the publishing thread once everything published before is findable."""

        def settled() -> None:
            self._settle()
            call()

        self._publisher.submit(settled)

    @property
    def window_address(self) -> str:
        return self._store.window_address

    @property
    def shared_as(self) -> str:
        return self._store.shared_as

    def follow(self, told: Callable[[CacheChange], None]) -> None:
        """See `PrefixStore.follow`."""
        self._store.follow(told)

    def set_members(self, addresses: Sequence[str]) -> None:
        """See `PrefixStore.set_members`."""
        self._store.set_members(addresses)

    def flush(self) -> None:
        """Block until everything published so far survives `kill -9`."""

        def flushed() -> None:
            self._settle()
            self._store.flush()

        self._publisher.submit(flushed).result()

    def counters(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counters)

    def gauges(self) -> dict[str, float]:
        stats = {f"store_{name}": value for name, value in self._store.stats().items()}
        with self._lock:
            return stats | {"publish_bytes_in_flight": self._in_flight}

    def close(self) -> None:
        """Finish what was submitted, then close the store."""
        self._loader.shutdown(wait=True)
        self._publisher.submit(self._settle)
        self._publisher.shutdown(wait=True)
        self._store.close()

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counters.update(amounts)


def _at_once() -> None:
    """Nothing to wait for."""
