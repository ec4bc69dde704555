"""Where the windows of a cached prefix come from: the words for it, and what a prefix is then.

A border between two blocks can be continued from when the blocks before it and the window state at
it are there. Blocks are stored; most states live in memory for minutes. One that is gone is rebuilt
by running cached tokens again over the stored blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WindowSource = Literal["local", "peer", "stored", "exact_replay", "bounded_replay", "miss"]
"""`local`: this worker's memory. `peer`: the memory of another one. `stored`: a tier below memory.
`exact_replay`: as many tokens run again as make it equal to the one that was lost.
`bounded_replay`: one window of tokens, an approximation. `miss`: blocks were found, but the replay
would have been the whole of them."""
RecoveryMode = Literal["exact", "bounded", "none"]
PersistState = Literal["last", "none", "all"]
"""Which states go below memory: of a request the last one of its prompt and of its answer, none,
or that of every border."""

MAX_GENERATION = 127
"""Bounded replays behind one another that are counted."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What may be done about a lost window state.

    exact_tokens: before a border, that make its state exactly; bounded_tokens: approximately.
    0 = the model keeps no such state.
    """

    mode: RecoveryMode = "none"
    exact_tokens: int = 0
    bounded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """What of a prompt is in place before it runs.

    n_tokens: whose blocks are there. start: the first token to run; less than `n_tokens` where
    cached tokens run again for their windows alone. window: None where none was needed.
    generation: above 0, bounded replays that this prefix, and so all that follows, rests on.
    """

    n_tokens: int = 0
    start: int = 0
    window: WindowSource | None = None
    generation: int = 0

    @property
    def replayed(self) -> int:
        """Cached tokens that run again."""
        return self.n_tokens - self.start


NOTHING = Prefix()
