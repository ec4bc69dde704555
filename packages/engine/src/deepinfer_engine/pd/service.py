"""What prefill and decode workers have in common: a model, its loop, and its prompt cache."""

from __future__ import annotations

import asyncio
import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Literal, Protocol

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.grammars import GrammarCompiler
from deepinfer_engine.core.loops import engine_loop
from deepinfer_engine.core.plan import Chunk, Progress
from deepinfer_engine.core.prefix_store import PrefixStore
from deepinfer_engine.core.runner import StepRunner
from deepinfer_engine.errors import ConfigError, EngineLost, TransferError
from deepinfer_engine.kv.connector import KVConnector
from deepinfer_engine.kv.parking import HostParking
from deepinfer_engine.pd.cache_feed import CacheFeed
from deepinfer_engine.pd.compiling import FairCompiler
from deepinfer_engine.pd.peers import ModelIdentity, PeerService
from deepinfer_engine.pd.transport import Connection, Frame
from deepinfer_engine.pd.wire import Body, FrameType


class Helpers(Protocol):
    """Other processes that compute with a worker."""

    on_lost: Callable[[str], None]
    """Called from any thread when one of them has ended: the worker then ends, too."""

    def counters(self) -> dict[str, float]: ...

    def gauges(self) -> dict[str, float]: ...

    def cpu_s(self) -> float:
        """Processor time they have used."""
        ...


class WorkerService(PeerService):
    """A worker that steps a model. Subclasses handle frames and progress."""

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        runner: StepRunner,
        store: PrefixStore | None,
        config: EngineConfig,
        cluster_key: bytes | None,
        grammars: GrammarCompiler | None = None,
        *,
        identity: ModelIdentity | None = None,
        helpers: Helpers | None = None,
    ) -> None:
        """`grammars` compiles constraints and is closed at the end; None serves none that is
        needed. `identity`: what peers compare beside the cache layout. `helpers`: processes that
        the runner computes with."""
        super().__init__(role, cluster_key, identity)
        self.grammars = grammars
        self.compiler = FairCompiler(grammars)
        self.runner = runner
        self.connector = (
            None
            if store is None
            else KVConnector(store, runner, persist_state=config.persist_state)
        )
        self.loop = engine_loop(
            runner,
            config,
            role,
            parking=HostParking(runner, config.park_bytes),
            link=self.connector,
            sink=self,
        )
        self._feed = CacheFeed()
        self._helpers = helpers
        self.step_with(self.loop, (lambda: 0.0) if helpers is None else helpers.cpu_s)
        if helpers is not None:
            helpers.on_lost = lambda text: self.step_failed(EngineLost(text))

    # -- what the two roles add -----------------------------------------------------------------

    @abstractmethod
    def role_handle(self, peer: Connection, kind: FrameType, frame: Frame) -> None:
        """One frame of an authenticated peer. TransferError closes the connection."""

    @abstractmethod
    def on_progress(self, progress: Progress) -> None:
        """Output of a sequence, on the event loop; a finishing one after its publications."""

    def extra_gauges(self) -> dict[str, float]:
        return {}

    def extra_counters(self) -> dict[str, float]:
        return {}

    # -- what every worker does -----------------------------------------------------------------

    def hello(self) -> Body:
        caps = self.runner.caps
        return {
            **super().hello(),
            "layout_hash": self.runner.layout.layout_hash,
            "block_tokens": self.runner.layout.block_tokens,
            "num_blocks": caps.num_blocks,
            "max_model_len": caps.max_model_len,
            "vocab_size": caps.vocab_size,
            "nextn": caps.nextn,
            "store": "" if self.connector is None else self.connector.shared_as,
            "windows": "" if self.connector is None else self.connector.window_address,
        }

    def handle(self, peer: Connection, kind: FrameType, frame: Frame) -> None:
        router = peer.hello.get("role") == "router"
        if kind is FrameType.MEMBERS and router:
            self._members(frame.body())
        elif kind is FrameType.CACHE_WANTED and router:
            self._feed.joined(peer)
        else:
            self.role_handle(peer, kind, frame)

    def peer_joined(self, peer: Connection) -> None:
        if peer.hello.get("role") == "router" and self.connector is not None:
            self._feed.joined(peer)

    def peer_lost(self, peer: Connection) -> None:
        self._feed.left(peer)

    def serving(self) -> None:
        if self.connector is not None:
            self.connector.follow(lambda change: self.post(self._feed.changed, change))

    async def flush(self) -> None:
        if self.connector is not None:
            await asyncio.to_thread(self.connector.flush)

    async def close(self) -> None:
        if self.connector is not None:
            await asyncio.to_thread(self.connector.close)
        if self.grammars is not None:
            await asyncio.to_thread(self.grammars.close)

    def load(self) -> tuple[dict[str, float], dict[str, float]]:
        counters, gauges = self.loop.snapshot()
        if self.connector is not None:
            counters |= self.connector.counters()
            gauges |= self.connector.gauges()
        if self.grammars is not None:
            counters |= self.grammars.counters()
            gauges |= self.grammars.gauges()
        if self._helpers is not None:
            counters |= self._helpers.counters()
            gauges |= self._helpers.gauges()
        return counters | self.extra_counters(), gauges | self.extra_gauges()

    def _members(self, body: Body) -> None:
        """Who else holds windows. A bad address is the router's fault and costs its connection."""
        if self.connector is not None:
            try:
                self.connector.set_members(body["addresses"])
            except ConfigError as error:
                raise TransferError(str(error)) from None

    # -- Sink, from the step thread -------------------------------------------------------------

    @abstractmethod
    def chunk_done(self, chunk: Chunk) -> None: ...

    def progress(self, progress: Progress) -> None:
        post = functools.partial(self.post, self.on_progress, progress)
        if progress.finish in ("stop", "length") and self.connector is not None:
            # The next turn may come at once, and must find what this one published.
            self.connector.after_publications(post)
        else:
            post()
