"""When each prefill worker would have the first token of a prompt, and who is shed for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from statistics import median

from deepinfer_engine.core.block_hashes import block_hashes
from deepinfer_engine.core.types import GenerateRequest
from deepinfer_engine.errors import EngineUnavailable
from deepinfer_engine.router.choose import Candidate, affinity_key, by_ttft
from deepinfer_engine.router.index import NOTHING, PrefixIndex
from deepinfer_engine.router.link import WorkerLink

CONVERSATIONS = 1 << 16
"""Of so many the router remembers where their last turn was computed."""
OTHER_KIND = 2.0
"""A worker that is so much faster or slower than usual is of another kind; less is noise, which
would tilt the balance."""
SHED_AT = 2.0
"""Targets after which requests are shed, where nothing else is said."""
SHED_SHARE = 0.5
"""Requests behind others (priority above 0) are shed at this part of the limit, those before
others (below 0) at its double."""


class PrefillChoice:
    """Where prompts go, by what the workers hold and have to do, and where the turn before went."""

    def __init__(
        self,
        index: PrefixIndex,
        ttft_shed_s: float | None = None,
        ttft_target_s: float | None = None,
    ) -> None:
        """`ttft_target_s`: what first tokens shall take. `ttft_shed_s`: whose would take longer is
        not taken; None with a target: its double."""
        self._index = index
        if ttft_shed_s is None and ttft_target_s is not None:
            ttft_shed_s = SHED_AT * ttft_target_s
        self._ttft_shed_s = ttft_shed_s
        self._target_ms = None if ttft_target_s is None else 1000 * ttft_target_s
        self._homes: OrderedDict[int, str] = OrderedDict()
        """Last whole block of a prompt -> the worker that computed it."""

    def choose(
        self, request: GenerateRequest, links: Sequence[WorkerLink]
    ) -> Candidate[WorkerLink]:
        """The worker for a prompt, of those that can take it. Raises EngineUnavailable where its
        first token would take too long."""
        info = links[0].info
        if info is None:
            raise RuntimeError("a worker that was never connected cannot be a candidate")
        size, tokens = info.block_tokens, request.token_ids
        chain = block_hashes(tokens, request.salt, size, info.layout_hash, request.pictures)
        candidates, key = self._scored(request, links, chain, size)
        if not request.resumed:  # what is being answered already is not sent away
            check_wait(request, min(one.ttft_ms for one in candidates), self._ttft_shed_s)
        best = by_ttft(candidates, key, self._target_ms)
        if chain:
            self._homes.pop(chain[-1], None)
            self._homes[chain[-1]] = best.address
            if len(self._homes) > CONVERSATIONS:
                self._homes.popitem(last=False)
        return best

    def _scored(
        self, request: GenerateRequest, links: Sequence[WorkerLink], chain: list[int], size: int
    ) -> tuple[list[Candidate[WorkerLink]], bytes]:
        """Every worker as this prompt sees it, and the key that tells equal ones apart: the first
        block that nobody holds, which is another one for each conversation that begins, even where
        all begin alike."""
        count = len(request.token_ids)
        # The last token is always computed, so a block that ends with it is no hit.
        overlaps = self._index.overlaps(chain[: (count - 1) // size])
        home = next((self._homes[b] for b in reversed(chain) if b in self._homes), None)
        known = [link.work.rate for link in links if link.work.rate is not None]
        usual = median(known) if known else None
        found: list[Candidate[WorkerLink]] = []
        for link in links:
            overlap, work = overlaps.get(link, NOTHING), link.work
            memory, below = overlap.memory * size, (overlap.whole - overlap.memory) * size
            rate = work.rate
            if rate is None or (
                usual is not None and usual / OTHER_KIND < rate < usual * OTHER_KIND
            ):
                rate = usual
            cost = work.cost_ms(count - overlap.whole * size, memory, below, rate)
            mine = link.address == home
            found.append(Candidate(link, link.address, work.load, work.queue_ms, cost, mine))
        longest = max((overlap.whole for overlap in overlaps.values()), default=0)
        key = chain[longest].to_bytes(8) if longest < len(chain) else affinity_key(request)
        return found, key


def check_wait(request: GenerateRequest, soonest_ms: float, limit_s: float | None) -> None:
    """Raise EngineUnavailable for a request whose first token would take too long: those behind
    others first, those before others last."""
    if limit_s is None:
        return
    priority = request.sampling.priority
    limit = limit_s * (SHED_SHARE if priority > 0 else 1 / SHED_SHARE if priority < 0 else 1.0)
    wait = soonest_ms / 1000
    if wait > limit:
        raise EngineUnavailable(
            f"the first token would take {wait:.1f} s, and requests of priority {priority} wait "
            f"{limit:g} s at most here",
            retry_after_s=max(1.0, wait - limit),
        )
