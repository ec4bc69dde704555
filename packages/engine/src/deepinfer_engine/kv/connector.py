"""Between the loop and a prefix store: loads before a prompt runs, publications after a step.

Loads and publications have a thread each, so that neither a slow disk nor a full queue holds a
step. A load that fails becomes a shorter hit; a publication that finds too many bytes in flight
is dropped and counted. Nothing here raises into the loop.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from deepinfer_engine.core.loop import LoadedCallback
from deepinfer_engine.core.prefix_store import Hit, PrefixStore
from deepinfer_engine.core.runner import StepRunner
from deepinfer_engine.core.sequence import LiveSequence

log = logging.getLogger(__name__)

MAX_BYTES_IN_FLIGHT = 256 << 20
MAX_UNSETTLED = 32


class KVConnector:
    """`core.loop.PrefixLink` on a `PrefixStore`; owns it and two threads until `close`."""

    def __init__(
        self,
        store: PrefixStore,
        runner: StepRunner,
        *,
        max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
    ) -> None:
        self._store = store
        self._runner = runner
        self._limit = max_bytes_in_flight
        self._loader = ThreadPoolExecutor(1, "kv-load")
        self._publisher = ThreadPoolExecutor(1, "kv-publish")
        self._lock = threading.Lock()
        self._in_flight = 0
        self._unsettled: list[tuple[Callable[[], None], int]] = []
        """Puts that were handed over but may not be findable yet; the publishing thread's own."""
        self._counters: Counter[str] = Counter()

    # -- loads ----------------------------------------------------------------------------------

    def look_up(self, seq: LiveSequence, loaded: LoadedCallback) -> bool:
        hit = self._match(seq, None)
        if hit is None:
            self._count(prefix_miss_tokens=seq.prompt_len)
            return False
        self._loader.submit(self._load, seq, hit, loaded)
        return True

    def _match(self, seq: LiveSequence, limit_tokens: int | None) -> Hit | None:
        try:
            return self._store.match(
                seq.request.token_ids,
                seq.request.salt,
                limit_tokens=limit_tokens,
                pictures=seq.request.pictures,
            )
        except Exception:
            log.exception("prefix lookup failed; %s runs without a cache", seq.key)
            self._count(prefix_errors=1)
            return None

    def _load(self, seq: LiveSequence, hit: Hit | None, loaded: LoadedCallback) -> None:
        n_tokens = 0
        while hit is not None and n_tokens == 0:
            good = self._load_once(seq, hit)
            if good == hit.n_tokens:
                n_tokens = good
                for tier, blocks in hit.blocks_by_tier.items():
                    tokens = blocks * self._runner.layout.block_tokens
                    self._count(**{f"prefix_hit_tokens_{tier}": tokens})
            else:
                self._count(prefix_short_loads=1)
                # Blocks may be good while the state is not: then the hit is one block shorter.
                limit = min(good, hit.n_tokens - self._runner.layout.block_tokens)
                hit = self._match(seq, limit) if limit > 0 else None
        self._count(prefix_miss_tokens=seq.prompt_len - n_tokens)
        loaded(seq, n_tokens)

    def _load_once(self, seq: LiveSequence, hit: Hit) -> int:
        n_blocks = hit.n_tokens // self._runner.layout.block_tokens
        blocks = [self._runner.block_bytes(b) for b in seq.blocks[:n_blocks]]
        try:
            return self._store.load(hit, blocks, self._runner.state_bytes(seq.state_slot))
        except Exception:
            log.exception("loading a prefix failed; %s recomputes it", seq.key)
            self._count(prefix_errors=1)
            return 0
        finally:
            self._store.release(hit)

    # -- publications ---------------------------------------------------------------------------

    def publish(
        self,
        seq: LiveSequence,
        blocks: Sequence[tuple[int, int]],
        states: Sequence[tuple[int, int]],
    ) -> None:
        layout = self._runner.layout
        size = len(blocks) * layout.block_bytes + len(states) * layout.state_bytes
        with self._lock:
            if self._in_flight + size > self._limit:
                self._counters["prefix_dropped_bytes"] += size
                return
            self._in_flight += size
        block_copies = [bytes(self._runner.block_bytes(block_id)) for _, block_id in blocks]
        state_copies = [(p, bytes(self._runner.state_bytes(slot))) for p, slot in states]
        first = blocks[0][0] if blocks else 0
        ends = [p for p, _ in states] + [(i + 1) * layout.block_tokens for i, _ in blocks]
        tokens = tuple(seq.tokens[: max(ends)])
        self._publisher.submit(self._put, seq, tokens, first, block_copies, state_copies, size)

    def _put(
        self,
        seq: LiveSequence,
        tokens: tuple[int, ...],
        first: int,
        blocks: list[bytes],
        states: list[tuple[int, bytes]],
        size: int,
    ) -> None:
        findable: Callable[[], None] = _at_once
        try:
            findable = self._store.put(
                tokens,
                seq.request.salt,
                first,
                [memoryview(b) for b in blocks],
                [(p, memoryview(s)) for p, s in states],
                seq.request.traffic_class,
                seq.request.pictures,
            )
            self._count(prefix_put_blocks=len(blocks), prefix_put_states=len(states))
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
