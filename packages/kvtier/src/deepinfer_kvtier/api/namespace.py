"""One model, one layout, one tenant: the calls an engine makes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from deepinfer_kvtier.base.buffers import Buffers, Records, records_in
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.identity import (
    DIGEST_BYTES,
    ChainDigests,
    ChainHasher,
    MediaItem,
    TokenIds,
    check_digests,
    namespace_tag,
)
from deepinfer_kvtier.base.values import (
    APPROXIMATE_BIT,
    GENERATION_BITS,
    KIND_CODES,
    LayoutSpec,
    LoadResult,
)
from deepinfer_kvtier.flow.compression import Packing
from deepinfer_kvtier.flow.encode import Encoding
from deepinfer_kvtier.flow.encryption import Sealer
from deepinfer_kvtier.flow.handles import Durability, LoadJob, Match, PutTicket
from deepinfer_kvtier.flow.load import LoadRequest, start_load
from deepinfer_kvtier.flow.lookup import find_prefix
from deepinfer_kvtier.flow.plan import BlockQuality, Cost, Plan, ReplayMode, StoredState, choose_cut
from deepinfer_kvtier.flow.put import PutRequest, check_put, put_records
from deepinfer_kvtier.flow.tiers import TierSet, drop_records
from deepinfer_kvtier.log.format import MAX_PART_SUMS, Origin

Kind = Literal["block", "state"]
_BLOCK = KIND_CODES["block"]
_STATE = KIND_CODES["state"]


class Namespace:
    """Made by `Cache.namespace`. All calls are safe from several threads."""

    def __init__(
        self,
        cache: TierSet,
        *,
        layout: LayoutSpec,
        fingerprint: bytes,
        root: bytes,
        secret: bytes,
        shard: int,
        sealer: Sealer | None = None,
    ) -> None:
        self._sealer = sealer
        self.layout = layout
        self.fingerprint = fingerprint
        self.root = root
        self.shard = shard
        self.cache = cache
        self._secret = secret

    @property
    def id(self) -> str:
        """Opaque name for metrics: tells namespaces apart, reveals neither model nor tenant."""
        return self.root[:6].hex()

    @property
    def counts(self) -> Counter[str]:
        """Counters of this namespace in `stats()`; late ones share the entry "other"."""
        return self.cache.counts_of(self.id)

    def hasher(self) -> ChainHasher:
        """A fresh incremental hasher of this namespace's chain."""
        return ChainHasher(self._secret, self.root, self.layout.block_tokens)

    def match(
        self,
        tokens: TokenIds,
        media: Sequence[MediaItem] = (),
        *,
        want: Sequence[Kind] = ("block", "state"),
        lease_s: float = 60.0,
        max_blocks: int | None = None,
        leave_last: bool = True,
        accept_approximate: bool = True,
        digests: Sequence[bytes] | None = None,
    ) -> Match:
        """Find and lease the longest reusable prefix of a prompt.

        want:        with "state", the hit ends where the state slot is present too (exact).
        lease_s:     seconds until the pins are given back by themselves.
        leave_last:  never cover the whole prompt: at least one token must be computed for its
                     logits.
        accept_approximate: whether records computed from approximate windows count.
        digests:     from a `ChainHasher` that has seen exactly these tokens; saves hashing them
                     again.
        returns:     a Match, with 0 blocks when nothing is there. Never raises for storage trouble.
        raises:      ConfigError, UncacheableInput, ClosedError.
        """
        self.cache.check_open()
        kinds = _names("want", want)
        if set(kinds) - set(KIND_CODES) or "block" not in kinds:
            raise ConfigError(f'want must name "block" and optionally "state", got {kinds}')
        if not _number("lease_s", lease_s) > 0:  # not-a-number included
            raise ConfigError(f"lease_s must be above 0, got {lease_s}")
        n_tokens = _length("tokens", tokens)
        if digests is None:
            hasher = self.hasher()
            hasher.extend(tokens, media)
            digests = hasher.digests
        elif _length("digests", digests) != n_tokens // self.layout.block_tokens:
            raise ConfigError(
                f"{n_tokens} tokens have {n_tokens // self.layout.block_tokens} whole blocks,"
                f" got {len(digests)} digests"
            )
        else:
            check_digests(digests)
        limit = max(0, n_tokens - 1 if leave_last else n_tokens) // self.layout.block_tokens
        if max_blocks is not None:
            limit = min(limit, max(0, _whole("max_blocks", max_blocks)))
        return find_prefix(
            self.cache,
            self.layout,
            self.shard,
            self.counts,
            ChainDigests.at(digests, 0, self.root),
            limit=limit,
            prompt_tokens=n_tokens,
            exact="state" in kinds and self.layout.payload_bytes("state") > 0,
            lease_s=lease_s,
            accept_approximate=accept_approximate,
            root=self.root,
        )

    def _own(self, match: Match) -> None:
        """raises: ConfigError for a match of another namespace: its bytes are not this tenant's."""
        if not isinstance(match, Match):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"expected what `match` returned, got {type(match).__name__}")
        if match.root != self.root:
            raise ConfigError("this match belongs to another namespace: use that, or match here")

    def plan(self, match: Match, *, cost: Cost | None = None, mode: ReplayMode = "bounded") -> Plan:
        """Decide how many of the matched blocks to load, and where the window state comes from.

        cost: what loading and computing cost; default the cache's own model, which follows the
              loads it has seen.
        mode: "exact" never uses approximate state, "bounded" may rebuild windows from the last
              cached tokens, "none" uses stored state only.
        """
        self._own(match)
        return _plan_match(self.cache, self.layout, match, cost=cost, mode=mode)

    def load(
        self,
        match: Match,
        *,
        blocks: slice | None = None,
        dst: Buffers = None,
        state_dst: Any = None,
        parts: Sequence[str] | None = None,
        deadline_ms: float | None = None,
        priority: int = 0,
        wait: bool = False,
    ) -> LoadJob:
        """Bring matched records into caller memory, each one complete and verified or reported as
        not.

        blocks:      which blocks of the prompt; default all of the hit, none when `dst` is None.
        dst:         room for them, see `deepinfer_kvtier.base.buffers`; it belongs to the job until
                     done.
        state_dst:   room for the state slot of `match.state`.
        parts:       order of arrival: names of parts or patterns such as "L2.*"; what none names
                     comes last. `job.ready("L2.*")` tells when it is there in every block.
        deadline_ms: after this long nothing more is started; what is missing comes back as TIMEOUT.
        priority:    larger is more urgent: loads of running prefills above those that prefetch. A
                     less urgent load lets more urgent ones pass between two pieces of its reads.
        wait:        load in this thread and return a job that is done.
        raises:      BufferShapeError, ConfigError, ClosedError; never for storage trouble.
        """
        self.cache.check_open()
        self._own(match)
        priority = _whole("priority", priority)
        if not isinstance(blocks, slice | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"blocks is a slice of the prompt's blocks, got {blocks!r}")
        if parts is not None:
            parts = _names("parts", [parts] if isinstance(parts, str) else parts)
        deadline = None
        if deadline_ms is not None:
            deadline = self.cache.clock.monotonic() + _number("deadline_ms", deadline_ms) / 1000
        request = LoadRequest(
            self.layout, self.shard, self._sealer, match, blocks, dst, state_dst, parts, deadline
        )
        return start_load(self.cache, request, priority=priority, wait=wait)

    async def aload(self, match: Match, **keywords: Any) -> LoadResult:
        """`load` for asyncio: same keywords (except `wait`), the result instead of a job."""
        from asyncio import wrap_future

        return await wrap_future(self.load(match, **keywords).future)

    def put(
        self,
        digests: Sequence[bytes],
        src: Buffers,
        *,
        parents: Sequence[bytes] | bytes | None = None,
        first_block: int | None = None,
        cls: str = "chat",
        durability: Durability = "behind",
        copy: bool = True,
        confirmed_tokens: int | None = None,
        approximate: bool = False,
        replay_generation: int = 0,
    ) -> PutTicket:
        """Store consecutive blocks of one chain. Never blocks on storage; refusals are in the
        ticket.

        digests:     of the blocks, first to last (32 bytes each).
        src:         their bytes, see `deepinfer_kvtier.base.buffers`.
        parents:     digest before each block, or before the first one only.
        first_block: position of `digests[0]` in its chain. None for both: as a part of
                     `match.digests` or `hasher.digests` says, else the beginning of a chain.
        cls:         retention class, a key of `KVTierConfig.classes`.
        durability:  what the ticket waits for: "behind" = the source may be reused, "flushed" =
                     every process sees it and it survives kill -9, "fsync" = it survives power
                     loss.
        copy:        False = no copy in this call; the source must stay unchanged until
                     `ticket.done`, else it is not stored ("source_changed" in `ticket.reasons`).
        confirmed_tokens: tokens whose acceptance is final; blocks that end beyond them are refused.
        approximate, replay_generation: from `Plan`, for records computed after a bounded replay.
        raises:      BufferShapeError, ConfigError, ClosedError.
        """
        count = _length("digests", digests)
        check_digests(digests)
        place: tuple[int, bytes] | None = None
        if isinstance(digests, ChainDigests):
            place = digests.first_block, digests.before
        elif first_block is None and parents is None and count:
            place = self._stored_place(digests[0])
        derived = first_block is None
        if first_block is None:
            first_block = 0 if place is None else place[0]
        elif _whole("first_block", first_block) < 0:
            raise ConfigError(f"first_block must be at least 0, got {first_block}")
        if parents is None and place is not None and (derived or place[0] == first_block):
            parents = place[1]
        return self._put(
            _BLOCK,
            digests,
            records_in(src, count, self.layout.part_sizes("block"), writable=False),
            parents=self._parents(digests, parents, first_block),
            first_depth=first_block + 1,
            cls=cls,
            durability=durability,
            copy=copy,
            confirmed_tokens=confirmed_tokens,
            approximate=approximate,
            generation=replay_generation,
            keep_alive=src,
        )

    def put_state(
        self,
        digest: bytes,
        src: Any,
        *,
        n_blocks: int | None = None,
        parent: bytes | None = None,
        cls: str = "chat",
        durability: Durability = "behind",
        copy: bool = True,
        confirmed_tokens: int | None = None,
        persist: bool | None = None,
        approximate: bool = False,
        replay_generation: int = 0,
    ) -> PutTicket:
        """Store the whole state slot that belongs to the boundary after the block `digest`.

        n_blocks: how many blocks lie before the boundary; needed with `confirmed_tokens`.
        persist:  whether it goes below host memory; None = as the setting `persist_state` says. An
                  engine that keeps the last window of a request only passes False for the others.
        The other keywords are those of `put`.
        raises:   BufferShapeError, ConfigError, ClosedError.
        """
        if "state" not in self.layout.kinds:
            raise ConfigError('this layout has no kind "state"')
        if confirmed_tokens is not None and n_blocks is None:
            raise ConfigError("confirmed_tokens needs n_blocks to compare with")
        return self._put(
            _STATE,
            [digest],
            records_in([src], 1, self.layout.part_sizes("state"), writable=False),
            persist=self.cache.config.persist_state if persist is None else bool(persist),
            parents=[parent or bytes(DIGEST_BYTES)],
            first_depth=n_blocks or 0,
            cls=cls,
            durability=durability,
            copy=copy,
            confirmed_tokens=confirmed_tokens,
            approximate=approximate,
            generation=replay_generation,
            keep_alive=src,
        )

    async def aput(self, digests: Sequence[bytes], src: Buffers, **keywords: Any) -> PutTicket:
        """`put` for asyncio: returns the ticket once it is done."""
        from asyncio import wrap_future

        return await wrap_future(self.put(digests, src, **keywords).future)

    async def aput_state(self, digest: bytes, src: Any, **keywords: Any) -> PutTicket:
        """`put_state` for asyncio: returns the ticket once it is done."""
        from asyncio import wrap_future

        return await wrap_future(self.put_state(digest, src, **keywords).future)

    def drop(self, digests: Sequence[bytes], *, kinds: Sequence[Kind] = ("block", "state")) -> int:
        """Forget records in every tier and every process on the directory; returns how many were
        found.

        Other processes follow at their next refresh, `gc_interval_s` at the latest. Opened with
        `read_only`, only this process forgets.
        raises: ConfigError for digests or kinds that are none.
        """
        self.cache.check_open()
        _length("digests", digests)
        check_digests(digests)
        unknown = set(_names("kinds", kinds)) - set(KIND_CODES)
        if unknown:
            raise ConfigError(f"kinds are {sorted(KIND_CODES)}, got {sorted(unknown)}")
        return drop_records(self.cache, [KIND_CODES[name] for name in kinds], self.shard, digests)

    def _stored_place(self, digest: bytes) -> tuple[int, bytes] | None:
        """Where in its chain a block that is in memory lies, and what is before it."""
        record = self.cache.host.peek(_BLOCK, digest)
        return None if record is None else (record.depth - 1, record.parent)

    def _parents(
        self, digests: Sequence[bytes], parents: Sequence[bytes] | bytes | None, first_block: int
    ) -> list[bytes]:
        if parents is None:
            if first_block:
                raise ConfigError(
                    f"blocks from {first_block} on need the digest before them: pass parents"
                )
            parents = self.root
        if isinstance(parents, bytes):
            return [parents, *digests[:-1]][: len(digests)]
        if _length("parents", parents) != len(digests):
            raise ConfigError(f"expected {len(digests)} parents, got {len(parents)}")
        return list(parents)

    def _summed_parts(self, kind: int) -> tuple[int, ...]:
        """Sizes of the parts that get sums of their own."""
        if not self.cache.config.part_sums or kind != _BLOCK:
            return ()
        sizes = self.layout.part_sizes("block")
        return sizes if 1 < len(sizes) <= MAX_PART_SUMS else ()

    def _packing(self, kind: int) -> Packing | None:
        """What compresses records of a kind."""
        compressor = self.cache.compressor
        if compressor is None:
            return None
        return compressor.packing(tuple(self.layout.kinds["block" if kind == _BLOCK else "state"]))

    def _put(
        self,
        kind: int,
        digests: Sequence[bytes],
        source: Records,
        *,
        parents: list[bytes],
        first_depth: int,
        cls: str,
        durability: Durability,
        copy: bool,
        confirmed_tokens: int | None,
        approximate: bool,
        generation: int,
        keep_alive: Any,
        persist: bool = True,
    ) -> PutTicket:
        self.cache.check_open()
        if confirmed_tokens is not None and _whole("confirmed_tokens", confirmed_tokens) < 0:
            raise ConfigError(f"confirmed_tokens must be at least 0, got {confirmed_tokens}")
        generation = _whole("replay_generation", generation)
        first_depth = _whole("n_blocks", first_depth)
        check_put(self.cache.config, digests, parents, cls, durability, first_depth)
        confirmed = len(digests)
        if confirmed_tokens is not None:
            confirmed = max(0, confirmed_tokens // self.layout.block_tokens - first_depth + 1)
        ticket = put_records(
            self.cache,
            PutRequest(
                Origin(
                    kind=kind,
                    shard=self.shard,
                    cls=cls,
                    cls_code=self.cache.config.classes[cls].code,
                    fingerprint=self.fingerprint,
                    namespace=namespace_tag(self.root),
                    approximate=approximate,
                    generation=min(max(generation, 0), GENERATION_BITS),
                ),
                encoding=Encoding(self._summed_parts(kind), self._packing(kind), self._sealer),
                digests=digests,
                source=source,
                parents=parents,
                first_depth=first_depth,
                durability=durability,
                copy=copy,
                confirmed=confirmed,
                persist=persist,
            ),
        )
        ticket.keep_alive(keep_alive)
        return ticket


def _plan_match(
    tiers: TierSet, layout: LayoutSpec, match: Match, *, cost: Cost | None, mode: ReplayMode
) -> Plan:
    """Everything behind `Namespace.plan`. raises: ConfigError."""
    if mode not in ("bounded", "exact", "none"):
        raise ConfigError(f"mode is bounded, exact or none, got {mode!r}")
    if not isinstance(cost, Cost | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"cost is a Cost, got {cost!r}")
    state_at: dict[int, StoredState] = {}
    if match.state is not None:
        hit = match.state
        state_at[hit.n_blocks] = StoredState(
            hit.tier, hit.bytes, hit.approximate, hit.replay_generation
        )
    plan = choose_cut(
        prompt_tokens=match.prompt_tokens,
        block_tokens=layout.block_tokens,
        block_bytes=layout.payload_bytes("block"),
        tiers=match.tiers(),
        state_at=state_at,
        needs_state=layout.payload_bytes("state") > 0,
        marks=[
            BlockQuality(bool(mark & APPROXIMATE_BIT), mark & GENERATION_BITS)
            for mark in match.marks().tolist()
        ],
        mode=mode,
        cost=cost or tiers.costs.current(),
    )
    tiers.counts[f"plans_{plan.state}"] += 1
    return plan


def _whole(name: str, value: Any) -> int:
    """raises: ConfigError for what is no whole number."""
    if isinstance(value, bool):
        raise ConfigError(f"{name} is a whole number, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is a whole number, got {value!r}") from None


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is a number, got {value!r}")
    return float(value)


def _length(name: str, value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        raise ConfigError(f"{name} is a sequence, got {type(value).__name__}") from None


def _items(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise ConfigError(f"{name} is a sequence, got {type(value).__name__}") from None


def _names(name: str, value: Any) -> tuple[str, ...]:
    found = _items(name, value)
    if isinstance(value, str) or not all(isinstance(item, str) for item in found):
        raise ConfigError(f"{name} is a sequence of names, got {value!r}")
    return found
