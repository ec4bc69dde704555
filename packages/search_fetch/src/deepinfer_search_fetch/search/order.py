"""Final order: copies folded, then greedy diversification with a limit per host.

Candidates come in blocks, best block first, and a block is used up before the next one is looked
at. So the first results never depend on how many were asked for, and pages of results fit together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from deepinfer_search_fetch.index.dedupe import UNSURE_DISTANCE, near_duplicates
from deepinfer_search_fetch.search.judge import Scored

SAME_HOST_SIMILARITY = 0.5
HOST_WINDOW = 10
ALIKE_BITS = 16


class Ordering:
    """Takes blocks of candidates and lines results up until `wanted` stand.

    max_per_host: at most so many of one host in any HOST_WINDOW results in a row, None for no
    limit; what exceeds it moves down and is not lost.
    """

    def __init__(
        self, wanted: int, *, dedupe: bool, diversity: float, max_per_host: int | None
    ) -> None:
        self._wanted = wanted
        self._dedupe = dedupe
        self._diversity = diversity
        self._max_per_host = max_per_host
        self.results: list[Scored] = []

    @property
    def full(self) -> bool:
        return len(self.results) >= self._wanted

    def take(self, block: Iterable[Scored]) -> int:
        """Line up one block; returns how many distinct candidates it held."""
        fresh = sorted(block, key=lambda item: (-item.order, item.page.doc_id))
        if self._dedupe:
            fresh = self._fold(fresh)
        self._line_up(fresh)
        return len(fresh)

    def _fold(self, block: list[Scored]) -> list[Scored]:
        """Heads of groups of copies; a copy of an earlier result joins that one."""
        heads: list[Scored] = []
        for item in block:
            twin = next((h for h in (*self.results, *heads) if _copies(h, item)), None)
            if twin is None:
                heads.append(item)
            else:
                twin.members.append(item)
        return [_represented(head) for head in heads]

    def _line_up(self, block: list[Scored]) -> None:
        rest = [(item, self._similarity_to_results(item)) for item in block]
        while rest and not self.full:
            recent = Counter(r.host for r in self.results[-(HOST_WINDOW - 1) :])
            options = [i for i, (item, _) in enumerate(rest) if self._allowed(item, recent)]
            best = max(
                options or range(len(rest)),
                key=lambda i: (
                    (1 - self._diversity) * rest[i][0].score - self._diversity * rest[i][1],
                    -i,
                ),
            )
            chosen, _ = rest.pop(best)
            self.results.append(chosen)
            rest = [(item, max(known, _similarity(item, chosen))) for item, known in rest]

    def _allowed(self, item: Scored, recent: Counter[str]) -> bool:
        host = item.host
        return self._max_per_host is None or not host or recent[host] < self._max_per_host

    def _similarity_to_results(self, item: Scored) -> float:
        return max((_similarity(item, r) for r in self.results), default=0.0)


def _copies(a: Scored, b: Scored) -> bool:
    distance = (a.fingerprint.simhash ^ b.fingerprint.simhash).bit_count()
    return distance <= UNSURE_DISTANCE and near_duplicates(
        a.fingerprint, b.fingerprint, lambda: (a.page.content, b.page.content)
    )


def _similarity(a: Scored, b: Scored) -> float:
    """0 for unrelated, 1 for equal; pages of one host are at least SAME_HOST_SIMILARITY alike."""
    same_host = SAME_HOST_SIMILARITY if a.host and a.host == b.host else 0.0
    # Unrelated texts differ in 32 bits, give or take 4; texts of one topic are not yet alike.
    agreement = 1 - (a.fingerprint.simhash ^ b.fingerprint.simhash).bit_count() / ALIKE_BITS
    return max(same_host, agreement)


def _represented(head: Scored) -> Scored:
    """The member that stands for the group: highest authority, then earliest, then shortest URL.

    The group keeps its best place.
    """
    group = [head, *head.members]
    chosen = min(
        group,
        key=lambda s: (
            -s.authority.score,
            s.page.published or "9999",
            len(s.page.url),
            s.page.url,
        ),
    )
    if chosen is not head:
        chosen.order = head.order
        chosen.members = [s for s in group if s is not chosen]
        head.members = []
    return chosen
