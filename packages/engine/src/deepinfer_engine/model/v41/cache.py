"""The cache of one sequence, as its owner handles it: truncate, export, import."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_engine.core.runner import BLOCK_TOKENS
from deepinfer_engine.errors import RequestError
from deepinfer_engine.model.v41.config import TextConfig
from deepinfer_engine.model.v41.pools import Pools

Ids: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | Tensor
IdArray: TypeAlias = npt.NDArray[np.int64]


def token_array(ids: object, vocab_size: int) -> IdArray:
    """int64 [n] of at least one token, all in the vocabulary; raises RequestError otherwise."""
    try:
        array = np.asarray(ids)
    except ValueError:  # ragged
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise RequestError(
            f"token ids are a flat list of at least one integer, got {array.dtype} of shape "
            f"{array.shape}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        raise RequestError(f"token ids are 0..{vocab_size - 1}, got {low if low < 0 else high}")
    return array.astype(np.int64)


class CacheMemory:
    """Blocks and state slots handed out to caches; grows when they run out. Page 0 of each is
    never given away: padding points there."""

    def __init__(self, pools: Pools, config: TextConfig) -> None:
        self.pools = pools
        self.config = config
        self._blocks = list(range(len(pools.blocks) - 1, 0, -1))
        self._slots = list(range(len(pools.states) - 1, 0, -1))

    def take_blocks(self, count: int) -> list[int]:
        """`count` zeroed blocks."""
        while len(self._blocks) < count:
            self._grow(blocks=True)
        taken = [self._blocks.pop() for _ in range(count)]
        self.pools.blocks[taken] = 0
        return taken

    def take_slot(self) -> int:
        """A zeroed state slot."""
        if not self._slots:
            self._grow(blocks=False)
        slot = self._slots.pop()
        self.pools.states[slot] = 0
        return slot

    def give(self, blocks: Sequence[int], slot: int) -> None:
        """Take memory back."""
        self._blocks.extend(blocks)
        self._slots.append(slot)

    def _grow(self, *, blocks: bool) -> None:
        before = len(self.pools.blocks), len(self.pools.states)
        self.pools.grow(before[0] * (2 if blocks else 1), before[1] * (1 if blocks else 2))
        self._blocks.extend(range(before[0], len(self.pools.blocks)))
        self._slots.extend(range(before[1], len(self.pools.states)))


class Cache:
    """What a model keeps of one sequence. Made by `Model.prefill` or `Model.new_cache`; its memory
    goes back to the model when it is closed or collected."""

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory
        self.blocks: list[int] = []
        self.slot = memory.take_slot()
        self.tokens: IdArray = np.empty(0, dtype=np.int64)
        """int64 [length]: what was fed."""
        self.is_image: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
        """bool [length]: which of them were tokens of pictures."""
        self.approximate = False
        """Whether some of it was computed from a window that had been lost."""
        self._has_state = True
        self._earliest = 0
        self._close = weakref.finalize(self, memory.give, self.blocks, self.slot)

    @property
    def length(self) -> int:
        """Tokens fed."""
        return len(self.tokens)

    def close(self) -> None:
        """Give the memory back now; using the cache afterwards raises RequestError."""
        self._close()

    def truncate(self, length: int) -> None:
        """Take back the last tokens: afterwards they were never fed.

        Windows keep as many spare rows as a draft block has, so at most that many tokens can be
        taken back from the longest the sequence has been. Raises RequestError beyond.
        """
        self.require_state(self._memory)
        if not isinstance(length, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"truncate: length must be an integer, got {length!r}")
        if not self._earliest <= length <= self.length:
            raise RequestError(
                f"truncate: this cache can go back to {self._earliest}..{self.length} tokens, "
                f"got {length}"
            )
        self.tokens, self.is_image = self.tokens[:length], self.is_image[:length]

    def export_blocks(self) -> Tensor:
        """uint8 [ceil(length/128), block bytes]: compressed entries of every token, last block
        partly filled."""
        self._require_open()
        # truncating keeps blocks for the tokens to come
        return self._memory.pools.blocks[self.blocks[: -(-self.length // BLOCK_TOKENS)]].clone()

    def import_blocks(
        self, blocks: Tensor, tokens: Ids, is_image: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Make this (empty) cache that of `tokens`, without its windows.

        is_image: that of the cache the blocks come from; None for text alone.

        Follow with `import_state`; or, at a multiple of 128 tokens, go on without it: `prefill` and
        `decode` then run the last window again, unless a picture is in it. Raises RequestError
        when a shape is wrong.
        """
        self._require_open()
        ids = token_array(tokens, self._memory.config.vocab_size)
        wanted = (-(-len(ids) // BLOCK_TOKENS), self._memory.pools.layout.block_bytes)
        self._check("import_blocks", blocks, wanted)
        is_image = np.zeros(len(ids), dtype=np.bool_) if is_image is None else is_image
        if is_image.shape != ids.shape or is_image.dtype != np.bool_:
            raise RequestError(f"import_blocks: is_image must be bool [{len(ids)}]")
        if self.length:
            raise RequestError(f"import_blocks: this cache already holds {self.length} tokens")
        self.reserve(len(ids))
        self._memory.pools.blocks[self.blocks[: len(blocks)]] = blocks
        self.tokens, self._has_state, self._earliest = ids, False, len(ids)
        self.is_image = is_image

    def export_state(self) -> Tensor:
        """uint8 [state bytes]: windows and open groups at the present length."""
        self.require_state(self._memory)
        return self._memory.pools.states[self.slot].clone()

    def import_state(self, state: Tensor) -> None:
        """The state exported at exactly this length. Raises RequestError when the shape is
        wrong."""
        self._require_open()
        self._check("import_state", state, (self._memory.pools.layout.state_bytes,))
        self._memory.pools.states[self.slot] = state
        self._has_state = True

    # -- for the model ----------------------------------------------------------------------------

    def reserve(self, length: int) -> None:
        """Own blocks for `length` tokens."""
        missing = -(-length // BLOCK_TOKENS) - len(self.blocks)
        if missing > 0:
            self.blocks.extend(self._memory.take_blocks(missing))

    def lookback(self, end: int, size: int) -> tuple[int, ...]:
        """The up to `size` tokens before position `end`; -1 for those of pictures."""
        before = slice(max(0, end - size), end)
        return tuple(np.where(self.is_image[before], -1, self.tokens[before]).tolist())

    def extend(self, fed: IdArray, is_image: npt.NDArray[np.bool_]) -> None:
        """The model has run these tokens."""
        if not self._has_state:
            self._has_state, self.approximate = True, True
        self.tokens = np.concatenate([self.tokens, fed])
        self.is_image = np.concatenate([self.is_image, is_image])
        spare = self._memory.config.backtrack - 1
        self._earliest = max(self._earliest, self.length - spare)

    def lost_window(self, memory: CacheMemory) -> int:
        """Tokens that must run again because their window was not imported.

        Raises RequestError for a request that cannot be served.
        """
        self._require_open()
        if self._memory is not memory:
            raise RequestError("this cache belongs to another model")
        if self._has_state:
            return 0
        if self.length % BLOCK_TOKENS:
            raise RequestError(
                f"this cache has blocks of {self.length} tokens but no state: import the state, or "
                f"blocks of a multiple of {BLOCK_TOKENS} tokens"
            )
        window = min(self._memory.config.sliding_window, self.length)
        if self.is_image[self.length - window :].any():
            raise RequestError(
                "this cache has blocks but no state, and a picture in its last window cannot run "
                "again: import the state"
            )
        return window

    def require_state(self, memory: CacheMemory) -> None:
        """Raise RequestError unless the windows are here."""
        if self.lost_window(memory):
            raise RequestError("this cache has blocks but no state: import it, or feed a token")

    def _require_open(self) -> None:
        if not self._close.alive:
            raise RequestError("this cache is closed")

    @staticmethod
    def _check(what: str, given: Tensor, wanted: tuple[int, ...]) -> None:
        if not isinstance(given, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"{what} wants a tensor uint8 {list(wanted)}, got {type(given)}")
        if given.dtype != torch.uint8 or tuple(given.shape) != wanted:
            raise RequestError(
                f"{what} wants uint8 {list(wanted)} of this model and dtype, got {given.dtype} "
                f"{list(given.shape)}"
            )
