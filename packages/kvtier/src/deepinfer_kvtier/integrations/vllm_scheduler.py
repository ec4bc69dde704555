"""Scheduler side of the vLLM connector: finds prefixes, says which blocks to load and to save."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.integrations.vllm_config import (
    ConnectorSettings,
    Geometry,
    Scope,
    Scopes,
    class_of,
    media_of,
    scope_of,
)

MAX_EVENTS = 10_000
STEPS_IN_FLIGHT = 8
"""Steps that may have been scheduled and not run yet: as long a load is taken for not done."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Cache blocks of one request that a worker loads or saves in this step.

    digests:   for each shard, the blocks' digests.
    parents:   for each shard, the digest before the first of them.
    block_ids: the vLLM blocks that make them up, in order.
    skip:      leading vLLM blocks that hold the right bytes already and must not be written.
    """

    request_id: str
    scope: Scope
    digests: tuple[tuple[bytes, ...], ...]
    parents: tuple[bytes, ...]
    first_block: int
    block_ids: tuple[int, ...]
    skip: int = 0
    cls: str = "chat"


@dataclass(frozen=True, slots=True)
class Stored:
    """For KV events: consecutive blocks of one chain that are being saved."""

    digests: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    adapter: str | None


@dataclass(slots=True)
class _Tracked:
    request: Any
    scope: Scope
    cls: str
    chains: list[kvtier.ChainHasher]
    block_ids: list[int] = field(default_factory=list[int])
    saved: int = 0
    """Cache blocks that the cache has, as far as is known."""


class SchedulerSide:
    """State of the running requests. One thread, as vLLM's scheduler is.

    What `matched_tokens` promised stays leased until the workers must have loaded it, so that no
    process collects it in between.
    """

    def __init__(self, scopes: Scopes, geometry: Geometry, settings: ConnectorSettings) -> None:
        self._scopes = scopes
        self._geometry = geometry
        self._settings = settings
        self._tracked: dict[str, _Tracked | None] = {}
        self._external: dict[str, int] = {}
        self._promised: dict[str, list[kvtier.Match]] = {}
        self._loading: deque[list[kvtier.Match]] = deque()
        self._stored: deque[Stored] = deque(maxlen=MAX_EVENTS)
        self.lost_events = 0

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens in the cache beyond those computed here; asking again renews the lease."""
        tracked = self._track(request)
        if tracked is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        tokens = request.all_token_ids
        matches: list[kvtier.Match] = []
        for shard, chain in enumerate(self._extended(tracked, len(tokens))):
            ns = self._scopes.namespace(tracked.scope, shard)
            matches.append(ns.match(range(len(tokens)), digests=chain.digests, want=("block",)))
        # Every rank must load the same: what one shard lacks, none may use.
        n_blocks = min(match.n_blocks for match in matches)
        tracked.saved = max(tracked.saved, n_blocks)
        found = max(0, n_blocks * self._geometry.block_tokens - num_computed_tokens)
        _release(self._promised.pop(request.request_id, []))
        if found:
            self._promised[request.request_id] = matches
        else:
            _release(matches)
        return found

    def allocated(self, request: Any, num_external_tokens: int) -> None:
        """vLLM has room for what `matched_tokens` promised."""
        if num_external_tokens > 0 and self._track(request) is not None:
            self._external[request.request_id] = num_external_tokens

    def step(self, output: Any) -> tuple[list[Transfer], list[Transfer]]:
        """(loads, saves) of a step, from vLLM's SchedulerOutput."""
        loads: list[Transfer] = []
        saves: list[Transfer] = []
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.block_ids = list(new.block_ids[0])
                self._plan(new.req_id, tracked, new.num_computed_tokens, output, loads, saves)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            fresh = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                tracked.block_ids = list(fresh[0])
            elif fresh is not None:
                tracked.block_ids.extend(fresh[0])
            self._plan(request_id, tracked, cached.num_computed_tokens[i], output, loads, saves)
        self._external.clear()
        self._loading.append(
            [match for load in loads for match in self._promised.pop(load.request_id, [])]
        )
        if len(self._loading) > STEPS_IN_FLIGHT:
            _release(self._loading.popleft())
        return loads, saves

    def finished(self, request: Any) -> None:
        """Nothing of the request is in flight: saves end before their step does."""
        self._tracked.pop(request.request_id, None)
        self._external.pop(request.request_id, None)
        _release(self._promised.pop(request.request_id, []))

    def take_stored(self) -> list[Stored]:
        """What was saved since the last call; beyond `MAX_EVENTS` the oldest are lost."""
        stored = list(self._stored)
        self._stored.clear()
        return stored

    # -- inside

    def _track(self, request: Any) -> _Tracked | None:
        """What is known of a request; None for one that must not be cached."""
        key = request.request_id
        if key in self._tracked:
            return self._tracked[key]
        tracked: _Tracked | None = None
        try:
            media = media_of(request)
        except kvtier.UncacheableInput:
            pass
        else:
            scope = scope_of(request, self._settings)
            chains: list[kvtier.ChainHasher] = []
            for shard in range(self._geometry.shards):
                chain = self._scopes.namespace(scope, shard).hasher()
                chain.extend((), media)
                chains.append(chain)
            classes = self._scopes.cache.config.classes
            tracked = _Tracked(request, scope, class_of(request, self._settings, classes), chains)
        self._tracked[key] = tracked
        return tracked

    def _extended(self, tracked: _Tracked, n_tokens: int) -> list[kvtier.ChainHasher]:
        tokens = tracked.request.all_token_ids
        known = tracked.chains[0].n_tokens
        if n_tokens > known:
            fresh = list(tokens[known:n_tokens])
            for chain in tracked.chains:
                chain.extend(fresh)
        return tracked.chains

    def _plan(
        self,
        request_id: str,
        tracked: _Tracked,
        computed: int,
        output: Any,
        loads: list[Transfer],
        saves: list[Transfer],
    ) -> None:
        size = self._geometry.block_tokens
        external = self._external.get(request_id, 0)
        if external:
            first, last = (computed - external) // size, computed // size
            skip = (computed - external - first * size) // self._geometry.block_size
            loads.append(self._transfer(request_id, tracked, first, last, skip))
            tracked.saved = max(tracked.saved, last)
        else:
            # Fewer tokens computed than the cache was believed to have: a load has failed, and what
            # is computed instead is worth saving.
            tracked.saved = min(tracked.saved, computed // size)
        # Final are the tokens computed in earlier steps, and those of the prompt in this one: what
        # this step computes beyond the prompt may be drafts that are rejected.
        pending = getattr(tracked.request, "num_output_placeholders", 0)
        scheduled = computed + output.num_scheduled_tokens.get(request_id, 0)
        prompt = tracked.request.num_prompt_tokens
        final = max(min(computed - pending, len(tracked.request.all_token_ids)), 0)
        final = max(final, min(prompt, scheduled))
        last = min(final // size, len(tracked.block_ids) // self._geometry.per)
        if last > tracked.saved:
            self._extended(tracked, last * size)
            save = self._transfer(request_id, tracked, tracked.saved, last, 0)
            saves.append(save)
            self._note(save, tracked)
            tracked.saved = last

    def _transfer(
        self, request_id: str, tracked: _Tracked, first: int, last: int, skip: int
    ) -> Transfer:
        per = self._geometry.per
        return Transfer(
            request_id,
            tracked.scope,
            tuple(chain.digests[first:last] for chain in tracked.chains),
            tuple(chain.parent_of(first) for chain in tracked.chains),
            first,
            tuple(tracked.block_ids[first * per : last * per]),
            skip,
            tracked.cls,
        )

    def _note(self, save: Transfer, tracked: _Tracked) -> None:
        start = save.first_block * self._geometry.block_tokens
        digests: Sequence[bytes] = save.digests[0]
        end = start + len(digests) * self._geometry.block_tokens
        self.lost_events += len(self._stored) == MAX_EVENTS
        self._stored.append(
            Stored(
                tuple(digests),
                save.parents[0] if save.first_block else None,
                tuple(tracked.request.all_token_ids[start:end]),
                tracked.scope.adapter[0] if tracked.scope.adapter else None,
            )
        )


def _release(matches: Sequence[kvtier.Match]) -> None:
    for match in matches:
        match.release()
