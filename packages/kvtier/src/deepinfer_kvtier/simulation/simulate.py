"""What hit rate a capacity, a lifetime and a policy would give on a trace of requests.

The hit rate is tokens hit / tokens asked for, as a request sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from deepinfer_kvtier.base.config import RetentionClass
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.host.eviction import EvictionPolicy, Name, Use
from deepinfer_kvtier.host.policies import make_policy
from deepinfer_kvtier.simulation.oracle import Oracle
from deepinfer_kvtier.simulation.trace import Request


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Totals of one run; `peak_blocks` is the largest number of blocks held at once.

    Requests before `measure_from_s` warm the cache and are not counted.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    peak_blocks: int
    evicted_blocks: int
    hit_rate_by_class: dict[str, float]


def simulate(
    requests: Sequence[Request],
    *,
    capacity_blocks: int | None = None,
    ttl_s: float | None = None,
    refresh: bool = True,
    policy: str | Callable[[], EvictionPolicy] = "tail-lru",
    as_host: bool = False,
    block_tokens: int = 512,
    classes: Mapping[str, RetentionClass] | None = None,
    measure_from_s: float = 0.0,
) -> SimulationResult:
    """Replay a trace against a prefix cache.

    capacity_blocks: None = without limit.
    ttl_s:           seconds after which a block is no hit any more; None = never.
    refresh:         whether a hit renews the lifetime.
    policy:          a name, `module:Class`, or what makes an object of `EvictionPolicy`.
    as_host:         as host memory does it: only whole blocks are stored, and room for a request's
                     blocks is made before they come, at the cost of others.
    block_tokens:    tokens a block id of the trace stands for.
    classes:         lifetimes by the class of the request that used a block last; in place of
                     `ttl_s`.
    measure_from_s:  arrival of the first request that counts.
    raises:          ConfigError.
    """
    if capacity_blocks is not None and capacity_blocks < 0:
        raise ConfigError(f"capacity_blocks must be at least 0, got {capacity_blocks}")
    if block_tokens < 1:
        raise ConfigError(f"block_tokens must be at least 1, got {block_tokens}")
    for request in requests:
        most = -(-request.tokens // block_tokens)
        if not request.tokens // block_tokens <= len(request.blocks) <= most:
            raise ConfigError(
                f"the request at {request.at_s:g} s has {len(request.blocks)} blocks and"
                f" {request.tokens} tokens: blocks of the trace are not of {block_tokens} tokens"
            )
    if as_host:
        requests = [replace(r, blocks=r.blocks[: r.tokens // block_tokens]) for r in requests]
    made = Oracle(requests) if policy == "oracle" else make_policy(policy)
    cache = _Blocks(made, capacity_blocks, as_host)
    fresh_until = cache.fresh_until
    hit: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    counted = 0
    for request in requests:
        leading = 0
        for block in request.blocks:
            if fresh_until.get(block, -1.0) < request.at_s:
                break
            leading += 1
        if request.at_s >= measure_from_s:
            counted += 1
            asked[request.cls] += request.tokens
            hit[request.cls] += min(leading * block_tokens, request.tokens)
        lifetime = _lifetime(request, ttl_s, classes)
        if refresh or leading < len(request.blocks):
            for block in request.blocks:
                if block in fresh_until and (refresh or fresh_until[block] < request.at_s):
                    fresh_until[block] = request.at_s + lifetime
        try:
            cache.serve(request, leading, block_tokens, request.at_s + lifetime)
        except Exception as cause:
            raise ConfigError(f"the policy {policy!r} failed: {cause!r}") from cause
    return SimulationResult(
        requests=counted,
        prompt_tokens=asked.total(),
        hit_tokens=hit.total(),
        hit_rate=hit.total() / asked.total() if asked.total() else 0.0,
        peak_blocks=cache.peak,
        evicted_blocks=cache.evicted,
        hit_rate_by_class={cls: hit[cls] / tokens for cls, tokens in asked.items() if tokens},
    )


class _Blocks:
    """A cache of block names under one policy."""

    def __init__(self, policy: EvictionPolicy, capacity: int | None, as_host: bool) -> None:
        self._policy = policy
        self._capacity = capacity
        self._as_host = as_host
        self.fresh_until: dict[Name, float] = {}
        self.peak = self.evicted = 0

    def serve(self, request: Request, found: int, block_tokens: int, fresh_until: float) -> None:
        """A request found its first blocks; the others are computed and stored."""
        held, chain = self.fresh_until, request.blocks
        self._policy.used(Use(chain, found, request.tokens, block_tokens, request.at_s))
        new = [(block, before) for before, block in pairwise((None, *chain)) if block not in held]
        if self._as_host:
            pinned = {block for block in chain if block in held}
            new = new[: self._make_room(len(new), pinned.__contains__)]
        names = [block for block, _ in new]
        held.update(dict.fromkeys(names, fresh_until))
        self._policy.entered(names, [before for _, before in new], request.at_s)
        self._make_room(0, _unpinned)
        self.peak = max(self.peak, len(held))

    def _make_room(self, count: int, pinned: Callable[[Name], bool]) -> int:
        """Evict until `count` blocks fit; returns how many of them do."""
        if self._capacity is None:
            return count
        while len(self.fresh_until) + count > self._capacity:
            victim = self._policy.victim(pinned)
            if victim is None and not all(map(pinned, self.fresh_until)):
                raise LookupError("named no victim although there is one")
            if victim is None:
                break
            if pinned(victim):
                raise LookupError("named a victim that is in use")
            del self.fresh_until[victim]
            self._policy.left(victim)
            self.evicted += 1
        return min(count, self._capacity - len(self.fresh_until))


def _unpinned(name: Name) -> bool:
    return False


def _lifetime(
    request: Request, ttl_s: float | None, classes: Mapping[str, RetentionClass] | None
) -> float:
    if classes is not None:
        if request.cls not in classes:
            raise ConfigError(
                f"unknown class {request.cls!r}: lifetimes are given for {sorted(classes)}"
            )
        ttl_s = classes[request.cls].ttl_s
    return float("inf") if ttl_s is None else ttl_s
