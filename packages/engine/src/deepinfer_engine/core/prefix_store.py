"""`PrefixStore`: what the engine needs of a prefix cache, and the values it speaks in.

An exact hit ends where both are present: every block of the prefix and the whole state slot at its
end. Where a model keeps no state (`state_bytes == 0`), it ends behind any block. A store may lose
anything at any time; it may never return other bytes than were put.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deepinfer_engine.core.pictures import Picture
from deepinfer_engine.core.types import TrafficClass

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest usable prefix: `n_tokens > 0`, a multiple of the block, less than the prompt.

    blocks_by_tier: how many of the blocks come from which tier. handle: the store's own lease.
    """

    n_tokens: int
    blocks_by_tier: Mapping[str, int]
    handle: object


class PrefixStore(Protocol):
    """Blocks and state slots by (salt, tokens, pictures). Every call may run on any thread.

    The tokens of every picture are the same: two prompts with different pictures, told apart by
    digest, share no block from the first token of the picture on.
    """

    def match(
        self,
        tokens: Tokens,
        salt: str,
        *,
        limit_tokens: int | None = None,
        pictures: Sequence[Picture] = (),
    ) -> Hit | None:
        """The longest prefix with blocks and state, within the limit; leased until released."""
        ...

    def load(self, hit: Hit, blocks: Sequence[memoryview], state: memoryview) -> int:
        """Fill the views; returns how many leading tokens are verified (`hit.n_tokens`: all of it).

        The state view is filled only when everything was. Never raises for what was lost or
        damaged.
        """
        ...

    def release(self, hit: Hit) -> None:
        """Give the lease back."""
        ...

    def put(
        self,
        tokens: Tokens,
        salt: str,
        first_block: int,
        blocks: Sequence[memoryview],
        states: Sequence[tuple[int, memoryview]],
        traffic_class: TrafficClass,
        pictures: Sequence[Picture] = (),
    ) -> Callable[[], None]:
        """Store blocks `first_block ..` of this chain and whole states by position.

        Returns at once; calling the result returns when every process that shares the store can
        find them, and until then the views must not change. Best effort: a full store drops.
        `tokens` covers at least the last block and the last state.
        """
        ...

    def flush(self) -> None:
        """Return when everything put so far survives `kill -9`."""
        ...

    def stats(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...
