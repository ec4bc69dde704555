"""`PrefixStore`: what the engine needs of a prefix cache, and the values it speaks in.

A hit ends where every block of the prefix is present and its window state too, or can be rebuilt.
Where a model keeps no state (`state_bytes == 0`), it ends behind any block. A store may lose
anything at any time; it may never return other bytes than were put.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deepinfer_engine.core.block_hashes import CacheChange
from deepinfer_engine.core.pictures import Picture
from deepinfer_engine.core.types import TrafficClass
from deepinfer_engine.core.windows import WindowSource

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest usable prefix: `n_tokens > 0`, a multiple of the block, less than the prompt.

    blocks_by_tier: how many of the blocks come from which tier. handle: the store's own lease.
    window: where the state comes from; None for a model without. `miss`: blocks were found, their
        windows neither stand nor can be rebuilt from fewer tokens than these; `n_tokens` is 0.
    generation: bounded replays behind it, this one included; 0 = exact.
    """

    n_tokens: int
    blocks_by_tier: Mapping[str, int]
    handle: object
    window: WindowSource | None = None
    generation: int = 0

    @property
    def loads_state(self) -> bool:
        """Whether there is a state to load."""
        return self.window in ("local", "peer", "stored")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought: so many leading tokens, and the state where the hit has one."""

    n_tokens: int
    state: bool


@dataclass(frozen=True, slots=True)
class PrefixBlocks:
    """Whole blocks from a prompt's beginning, whose windows somebody else has.

    generation: bounded replays behind it, at most; 0: exact ones alone.
    """

    tokens: Tokens
    salt: str
    pictures: Sequence[Picture] = ()
    generation: int = 0


@dataclass(frozen=True, slots=True)
class BorderState:
    """The state at a border, to be put. persist: below memory, too."""

    position: int
    data: memoryview
    persist: bool = True


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
        """The longest prefix that can be continued, within the limit; leased until released."""
        ...

    def match_blocks(self, wanted: PrefixBlocks) -> Hit | None:
        """As many of these blocks as are there, without a window; leased until released."""
        ...

    def load(self, hit: Hit, blocks: Sequence[memoryview], state: memoryview) -> Loaded:
        """Fill the views; tells what of it is verified.

        The state view is filled where `hit.loads_state`. Never raises for what was lost or damaged.
        """
        ...

    def without_state(self, hit: Hit) -> Hit | None:
        """The same prefix, its state to be rebuilt; None where that may or can not be done."""
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
        states: Sequence[BorderState],
        traffic_class: TrafficClass,
        pictures: Sequence[Picture] = (),
        generation: int = 0,
    ) -> Callable[[], None]:
        """Store blocks `first_block ..` of this chain and whole states by position.

        Returns at once; calling the result returns when every process that shares the store can
        find them, and until then the views must not change. Best effort: a full store drops.
        `tokens` covers at least the last block and the last state. `generation`: of the prefix
        they were computed from.
        """
        ...

    @property
    def window_address(self) -> str:
        """Where other workers pull window states from; empty: they cannot."""
        ...

    def set_members(self, addresses: Sequence[str]) -> None:
        """The window addresses of all workers, this one's included. Raises ConfigError."""
        ...

    @property
    def shared_as(self) -> str:
        """Equal for stores that read what each other wrote; empty: nobody else reads it."""
        ...

    def follow(self, told: Callable[[CacheChange], None]) -> None:
        """Hear, on whatever thread, which blocks come and go, as far as their tokens are known.
        Once, before the first prompt."""
        ...

    def flush(self) -> None:
        """Return when everything put so far survives `kill -9`."""
        ...

    def stats(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...
