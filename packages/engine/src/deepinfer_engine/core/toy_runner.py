"""A tiny exact runner: the engine's test double, and a backend that needs no checkpoint.

The next token is a pure function of the whole history, yet it is computed only from what lies in
the blocks and in the state slot. A wrong block, a stale state, a wrong lookback or one flipped
bit changes the output. Drafts are right about three times in four, and rejected drafts leave
their bytes behind, as a real model's do.

    record(p) = mix(token p, tokens before it, position p)    one u64 in its block, u32 echo beside
    low(p)    = mix(token p, position p)                      ring of window + slack u64 in the slot
    high(p)   = mix(low(p), sum over the window of low)       another such ring
    next(p)   = mix(sum of odd-weighted records, sum over the window of high) mod vocabulary

Two windows on top of each other, so that a lost state takes more than one window of tokens to be
rebuilt. With `window=0` there is none and a slot holds no bytes, as in models that keep every
token.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepinfer_engine.core.runner import (
    CacheLayout,
    Caps,
    DecodeRow,
    PrefillChunk,
    Region,
    RowConstraint,
    StepOutput,
)
from deepinfer_engine.core.types import SamplingParams, TokenLogprob

MASK = (1 << 64) - 1
LEVELS = 2
"""Windows on top of each other."""
SLACK = 6
"""Ring rows beyond the window: as many positions as one step may run ahead of a block border."""


def _said(token: int, k: int, vocab: int) -> TokenLogprob:
    top = tuple(((token + i) % vocab, -0.5 * (i + 1)) for i in range(k))
    return TokenLogprob(token, -0.5, top)


def _mix(*values: int) -> int:
    """A 64-bit hash of integers (splitmix64 finaliser over a running state)."""
    h = 0x9E3779B97F4A7C15
    for value in values:
        h = (h ^ (value & MASK)) * 0xBF58476D1CE4E5B9 & MASK
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB & MASK
        h ^= h >> 31
    return h


class ToyRunner:
    """`StepRunner` over a hash function; temperature only selects the seed's stream."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_state_slots: int = 16,
        block_tokens: int = 128,
        vocab_size: int = 257,
        max_model_len: int = 4096,
        nextn: int = 5,
        lookback: int = 2,
        window: int = 32,
        fingerprint: str = "toy",
    ) -> None:
        if not 0 <= nextn <= SLACK - 1:
            raise ValueError(f"the toy drafts 0 .. {SLACK - 1} tokens, got nextn={nextn}")
        self._caps = Caps(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            nextn=nextn,
            lookback=lookback,
            eos_token_ids=(vocab_size - 1,),
            num_blocks=num_blocks,
            num_state_slots=num_state_slots,
            window=window,
            window_rows=window + SLACK if window else 0,
            window_layers=LEVELS if window else 0,
        )
        self._window = window
        self._ring = window + SLACK if window else 0
        main, echo = 8 * block_tokens, 4 * block_tokens
        shape = f"{fingerprint}/{block_tokens}/{lookback}/{window}/{vocab_size}"
        self._layout = CacheLayout(
            block_tokens=block_tokens,
            block_bytes=main + echo,
            state_bytes=8 * LEVELS * self._ring,
            block_regions=(Region("main", 0, 0, main), Region("echo", 0, main, echo)),
            state_regions=tuple(
                Region("window", level, 8 * level * self._ring, 8 * self._ring)
                for level in range(LEVELS if window else 0)
            ),
            layout_hash=hashlib.blake2b(shape.encode(), digest_size=16).hexdigest(),
        )
        self._blocks = np.zeros((num_blocks, main + echo), dtype=np.uint8)
        self._states = np.zeros((num_state_slots, 8 * LEVELS * self._ring), dtype=np.uint8)
        odd = np.arange(max_model_len, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._weights = odd
        self._busy = threading.Lock()

    @property
    def caps(self) -> Caps:
        return self._caps

    @property
    def layout(self) -> CacheLayout:
        return self._layout

    def block_bytes(self, block_id: int) -> memoryview:
        return memoryview(self._blocks[block_id]).cast("B")

    def state_bytes(self, slot: int) -> memoryview:
        return memoryview(self._states[slot]).cast("B")

    def clear_state(self, slot: int) -> None:
        self._states[slot] = 0

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[StepOutput | None]:
        with self._alone():
            return [self._prefill_one(chunk) for chunk in chunks]

    def decode(self, rows: Sequence[DecodeRow]) -> list[StepOutput]:
        with self._alone():
            return [self._decode_one(row) for row in rows]

    def mixed(
        self, chunks: Sequence[PrefillChunk], rows: Sequence[DecodeRow]
    ) -> tuple[list[StepOutput | None], list[StepOutput]]:
        """See `StepRunner.mixed`: nothing is shared between sequences here."""
        return self.prefill(chunks), self.decode(rows)

    def _alone(self) -> threading.Lock:
        if self._busy.locked():
            raise RuntimeError("a runner is not thread-safe: two steps ran at the same time")
        return self._busy

    def _prefill_one(self, chunk: PrefillChunk) -> StepOutput | None:
        tokens = [*chunk.lookback, *(int(t) for t in chunk.token_ids)]
        offset = len(chunk.lookback) - chunk.start
        borders = dict(chunk.snapshots)
        for p in range(chunk.start, chunk.start + len(chunk.token_ids)):
            self._feed(
                p,
                tokens[: p + offset + 1],
                chunk.block_table,
                chunk.state_slot,
                valid_start=chunk.valid_start,
                entries_from=chunk.entries_from,
            )
            if p + 1 in borders:
                self._states[borders[p + 1]] = self._states[chunk.state_slot]
        said: tuple[TokenLogprob, ...] = ()
        if chunk.prompt_logprobs is not None:
            said = tuple(
                _said(t, chunk.prompt_logprobs, self._caps.vocab_size)
                for t in chunk.following
                if t >= 0
            )
        if not chunk.sample:
            return StepOutput((), prompt_logprobs=said) if said else None
        end = chunk.start + len(chunk.token_ids)
        token, logprobs = self._next(
            end - 1, chunk.block_table, chunk.state_slot, chunk.sampling, chunk.resumed
        )
        token = self._nearest_allowed(token, chunk.constraint, ())
        if token < 0:
            return StepOutput((), failed=True)
        return StepOutput((token,), logprobs=logprobs, prompt_logprobs=said)

    def _decode_one(self, row: DecodeRow) -> StepOutput:
        history = list(row.history)
        position, emitted, logprobs = len(history) - 1, list[int](), list[TokenLogprob]()
        accepted, rejected, failed = 0, False, False
        for depth in range(row.max_draft + 1):
            self._feed(position + depth, history, row.block_table, row.state_slot)
            if rejected:  # its bytes stay behind, nothing is emitted
                history.append(0)
                continue
            token, some = self._next(
                position + depth,
                row.block_table,
                row.state_slot,
                row.sampling,
                len(history) - row.prompt_len,
            )
            token = self._nearest_allowed(token, row.constraint, emitted)
            if token < 0:
                failed = rejected = True
                history.append(0)
                continue
            emitted.append(token)
            logprobs += some
            wrong = _mix(token, position + depth) % 4 == 0
            draft = (token + 1) % self._caps.vocab_size if wrong else token
            history.append(draft)
            rejected = wrong
            if depth < row.max_draft and not rejected:
                accepted += 1
        return StepOutput(
            tokens=tuple(emitted),
            n_drafted=row.max_draft,
            n_accepted=accepted,
            logprobs=tuple(logprobs),
            failed=failed,
        )

    def _nearest_allowed(
        self, token: int, constraint: RowConstraint | None, before: Sequence[int]
    ) -> int:
        """The first allowed id from `token` on, behind the tokens of this step; -1 for none."""
        if constraint is None:
            return token
        rows = np.full((1 + len(before), constraint.mask_words), -1, dtype=np.int32)
        constraint.fill(rows, before)
        vocab = self._caps.vocab_size
        bits = np.unpackbits(rows[-1].view(np.uint8), bitorder="little")[:vocab]
        ids = np.flatnonzero(np.roll(bits, -token))
        return (token + int(ids[0])) % vocab if ids.size else -1

    def _feed(
        self,
        p: int,
        tokens: Sequence[int],
        table: Sequence[int],
        slot: int,
        *,
        valid_start: int = 0,
        entries_from: int = 0,
    ) -> None:
        """Write the record and the window values of position p; `tokens[-1]` is the token there."""
        size = self._layout.block_tokens
        block, row = table[p // size], p % size
        if block == 0 or (slot == 0 and self._ring):
            raise RuntimeError(f"position {p} is mapped to scratch memory")
        before = tokens[-1 - self._caps.lookback : -1] if self._caps.lookback else ()
        record = _mix(p, tokens[-1], *before)
        if p >= entries_from:
            self._main(block)[row] = record
            self._echo(block)[row] = record & 0xFFFFFFFF
        if not self._ring:
            return
        low, high = self._rings(slot)
        value = _mix(tokens[-1], p)
        low[p % self._ring] = value
        high[p % self._ring] = _mix(value, self._windowed(low, p, valid_start))

    def _rings(self, slot: int) -> npt.NDArray[np.uint64]:
        return self._states[slot].view(np.uint64).reshape(LEVELS, self._ring)

    def _windowed(self, ring: npt.NDArray[np.uint64], p: int, valid_start: int = 0) -> int:
        """Sum over the window that ends at position p."""
        first = max(valid_start, p + 1 - self._window)
        return int(ring[np.arange(first, p + 1) % self._ring].sum(dtype=np.uint64))

    def _next(
        self, p: int, table: Sequence[int], slot: int, sampling: SamplingParams, output_index: int
    ) -> tuple[int, tuple[TokenLogprob, ...]]:
        """The token after position p, from the bytes alone."""
        size, vocab = self._layout.block_tokens, self._caps.vocab_size
        total = 0
        for b in range(p // size + 1):
            rows = min(size, p + 1 - b * size)
            records = self._main(table[b])[:rows]
            weights = self._weights[b * size : b * size + rows]
            echo = self._echo(table[b])[:rows].astype(np.uint64)
            total += int((records * weights).sum(dtype=np.uint64)) + int(echo.sum(dtype=np.uint64))
        chained = 0
        if self._ring:
            chained = self._windowed(self._rings(slot)[1], p)
        seed = (sampling.seed or 0) if sampling.temperature > 0 else -1
        mixed = _mix(total, chained, p, seed)
        token = mixed % vocab
        banned = set(sampling.stop_token_ids) | set(self._caps.eos_token_ids)
        if output_index < sampling.min_tokens:
            while token in banned:
                token = (token + 1) % vocab
        if sampling.logprobs is None:
            return token, ()
        return token, (_said(token, sampling.logprobs, vocab),)

    def _main(self, block: int) -> npt.NDArray[np.uint64]:
        return self._blocks[block, : 8 * self._layout.block_tokens].view(np.uint64)

    def _echo(self, block: int) -> npt.NDArray[np.uint32]:
        return self._blocks[block, 8 * self._layout.block_tokens :].view(np.uint32)
