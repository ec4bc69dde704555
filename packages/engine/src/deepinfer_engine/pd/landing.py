"""The decode side of a transfer: whose memory is written, what has arrived, who still owns it.

    RESERVED ──unit──► WRITING ──commit──► COMMITTED ──all bytes──► READY ──► RUNNING ──► DONE
        └──────── abort, writer gone, broken protocol ────────► ABORTING ──writer gone──► GONE

READY needs both: every byte range of the prompt written exactly once by a unit of this attempt
whose digest is right, and a COMMIT that agrees in count and combined digest. Success flags alone
are nothing.

Reserved memory has two owners, the request and the writer. It becomes free when both are gone;
the writer is gone when everything landed, or when its grant is revoked, after which not a byte is
written for it. Blocks that are loaded from a shared cache have a third one, the load, until it has
ended: it writes from a thread that nobody stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from deepinfer_engine.core.loop import EngineLoop
from deepinfer_engine.core.plan import Reservation
from deepinfer_engine.core.runner import StepRunner
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.types import TokenLogprob
from deepinfer_engine.core.windows import Prefix
from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd import wire
from deepinfer_engine.pd.wire import UnitHeader, Xid

GROUP_BLOCKS, GROUP_STATE = 0, 1


class Stage(Enum):
    RESERVED = "reserved"
    WRITING = "writing"
    COMMITTED = "committed"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    ABORTING = "aborting"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Commit:
    """What prefill says when it has submitted everything."""

    n_units: int
    digest: int
    tokens: tuple[int, ...]
    """The prompt."""
    first_token: int
    first_logprobs: tuple[TokenLogprob, ...]
    prefix: Prefix


@dataclass(eq=False, slots=True)
class Attempt:
    """One attempt's memory and progress. `Landings` alone changes it."""

    xid: Xid
    grant_id: int
    reservation: Reservation
    stage: Stage = Stage.RESERVED
    writer: object | None = None
    """The peer whose units are accepted: the first that wrote, until revoked."""
    writer_owns: bool = True
    request_owns: bool = True
    commit: Commit | None = None
    units_seen: int = 0
    combined: int = 0
    blocks_written: set[int] = field(default_factory=set[int])
    state_ranges: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    corrupt_units: set[int] = field(default_factory=set[int])
    stored: tuple[int, ...] = ()
    """First tokens of the prompt, of which blocks were asked from the shared cache."""
    loading: int = 0
    """How many leading blocks a load is writing now."""


class Landings:
    """All attempts of one decode worker. Single-threaded: units land where they are handled."""

    def __init__(self, loop: EngineLoop, runner: StepRunner, *, first_grant: int) -> None:
        self._loop = loop
        self._runner = runner
        self._next_grant = first_grant
        self._by_grant: dict[int, Attempt] = {}
        self._by_key: dict[str, Attempt] = {}
        self._loads: set[Attempt] = set()
        self.counters = {
            "transfer_units": 0,
            "transfer_bytes": 0,
            "transfer_digest_errors": 0,
            "transfer_stored_bytes": 0,
        }

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._by_key.values())

    def get(self, xid: Xid) -> Attempt | None:
        return self._by_key.get(xid.key)

    def granted(self, grant_id: int) -> Attempt | None:
        return self._by_grant.get(grant_id)

    @property
    def writer_held_blocks(self) -> int:
        granted = sum(len(a.reservation.blocks) for a in self._by_key.values() if a.writer_owns)
        return granted + sum(a.loading for a in self._loads if not a.writer_owns)

    def reserve(self, xid: Xid, prompt_len: int, priority: int = 0) -> Attempt | None:
        """Memory for a prompt, or None when not now. Raises what `Scheduler.check_fits` raises."""
        if xid.key in self._by_key:
            raise TransferError(f"attempt {xid.key} has a reservation already")
        reservation = self._loop.reserve(prompt_len, priority)
        if reservation is None:
            return None
        self._loop.pin(reservation.blocks, reservation.state_slot)
        attempt = Attempt(xid, self._next_grant, reservation)
        self._next_grant += 1
        self._by_grant[attempt.grant_id] = attempt
        self._by_key[xid.key] = attempt
        return attempt

    def unit(self, writer: object, header: UnitHeader, payload: memoryview) -> Attempt | None:
        """Land one unit. None: no such grant (any more), nothing was written.

        Returns the attempt; `header.unit in attempt.corrupt_units` asks for a resend. Raises
        TransferError for a unit that its writer could not have meant: the attempt must be aborted.
        """
        views = self.place(writer, header)
        if views is None:
            return None
        at = 0
        for view in views:
            view[:] = payload[at : at + len(view)]
            at += len(view)
        return self.placed(writer, header)

    def place(self, writer: object, header: UnitHeader) -> Sequence[memoryview] | None:
        """Where the bytes of a unit go; as `unit` otherwise. Until `placed`, which must come before
        anything else does, it counts for nothing that something lies there."""
        attempt = self._by_grant.get(header.grant_id)
        if attempt is None or attempt.xid.attempt != header.attempt:
            return None
        if attempt.stage is Stage.ABORTING:
            return None
        if attempt.writer is not None and attempt.writer is not writer:
            raise TransferError(f"{attempt.xid.key} is written by two peers")
        self._check_unit(attempt, header)
        return self._views(attempt, header)

    def placed(self, writer: object, header: UnitHeader) -> Attempt:
        """The bytes of a unit lie where `place` has said: judge what is there now."""
        attempt = self._by_grant[header.grant_id]
        attempt.writer = writer
        # What lies there is judged, not what came: a payload in memory that others write may change
        # while it is read.
        if wire.unit_digest(self._views(attempt, header)) != header.digest:
            self.counters["transfer_digest_errors"] += 1
            if header.unit in attempt.corrupt_units:
                raise TransferError(
                    f"unit {header.unit} of {attempt.xid.key} arrived damaged twice"
                )
            attempt.corrupt_units.add(header.unit)
            return attempt
        self._count(attempt, header)
        attempt.corrupt_units.discard(header.unit)
        attempt.units_seen += 1
        attempt.combined = wire.add_to_combined(attempt.combined, header.unit, header.digest)
        self.counters["transfer_units"] += 1
        self.counters["transfer_bytes"] += header.nbytes
        if attempt.stage is Stage.RESERVED:
            attempt.stage = Stage.WRITING
        self._settle(attempt)
        return attempt

    def load_begins(
        self, writer: object, xid: Xid, tokens: tuple[int, ...]
    ) -> tuple[Attempt, list[memoryview]] | None:
        """Where the blocks of a prompt's first tokens are to be loaded; None: unknown attempt.

        `load_ended` must follow, whatever becomes of the attempt.
        """
        attempt = self._written(xid)
        if attempt is None:
            return None
        if attempt.writer is not None and attempt.writer is not writer:
            raise TransferError(f"{xid.key} is loaded for a peer that does not write it")
        n_blocks, rest = divmod(len(tokens), self._runner.layout.block_tokens)
        if rest or not 0 < len(tokens) < attempt.reservation.prompt_len:
            raise TransferError(f"{len(tokens)} stored tokens do not fit {xid.key}")
        if attempt.stored or attempt.commit or attempt.blocks_written & set(range(n_blocks)):
            raise TransferError(f"blocks of {xid.key} would be written a second time by a load")
        attempt.writer, attempt.stored, attempt.loading = writer, tokens, n_blocks
        attempt.stage = Stage.WRITING
        self._loads.add(attempt)
        reservation = attempt.reservation
        self._loop.pin(reservation.blocks[:n_blocks], reservation.state_slot)
        return attempt, [self._runner.block_bytes(b) for b in reservation.blocks[:n_blocks]]

    def load_ended(self, attempt: Attempt, n_blocks: int) -> bool:
        """So many leading blocks are there. False: nobody waits for them any more."""
        reservation = attempt.reservation
        self._loop.unpin(reservation.blocks[: attempt.loading], reservation.state_slot)
        self._loads.remove(attempt)
        attempt.loading = 0
        if attempt.stage is not Stage.WRITING:
            return False
        attempt.blocks_written.update(range(n_blocks))
        self.counters["transfer_stored_bytes"] += n_blocks * self._runner.layout.block_bytes
        return True

    def commit(self, writer: object, xid: Xid, commit: Commit) -> Attempt | None:
        """Take the COMMIT; READY at once or when the last unit lands. None: unknown attempt."""
        attempt = self._written(xid)
        if attempt is None:
            return None
        if attempt.writer is not None and attempt.writer is not writer:
            raise TransferError(f"{xid.key} is committed by a peer that does not write it")
        if attempt.commit is not None:
            if attempt.commit != commit:
                raise TransferError(f"{xid.key} was committed twice, differently")
            return attempt
        if len(commit.tokens) != attempt.reservation.prompt_len:
            raise TransferError(
                f"{xid.key} was reserved for {attempt.reservation.prompt_len} tokens and committed "
                f"with {len(commit.tokens)}"
            )
        if not commit.prefix.n_tokens < len(commit.tokens):
            raise TransferError(
                f"{xid.key}: {commit.prefix.n_tokens} of the prompt cannot be cached"
            )
        if attempt.loading or commit.tokens[: len(attempt.stored)] != attempt.stored:
            raise TransferError(f"{xid.key} was committed with other tokens than are loaded")
        attempt.writer = writer
        attempt.commit = commit
        attempt.stage = Stage.COMMITTED
        self._settle(attempt)
        return attempt

    def run(self, attempt: Attempt, seq: LiveSequence) -> None:
        """Hand a READY attempt's memory to the scheduler."""
        if attempt.stage is not Stage.READY:
            raise RuntimeError(f"{attempt.xid.key} is {attempt.stage.value}, not ready")
        self._loop.start(seq, attempt.reservation)
        attempt.stage = Stage.RUNNING

    def done(self, attempt: Attempt) -> None:
        """The sequence ended; the scheduler has freed its memory."""
        attempt.stage = Stage.DONE
        del self._by_key[attempt.xid.key]

    def abort(self, attempt: Attempt) -> None:
        """The request lets go of an attempt that does not run. Its memory waits for the writer."""
        if attempt.stage in (Stage.RUNNING, Stage.DONE, Stage.GONE):
            raise RuntimeError(f"{attempt.xid.key} is {attempt.stage.value}; abort its sequence")
        if attempt.request_owns:
            attempt.request_owns = False
            attempt.stage = Stage.ABORTING
            self._loop.cancel(attempt.reservation)
        self._forget_if_free(attempt)

    def revoke(self, attempt: Attempt) -> None:
        """End the writer's grant: from here on no unit of it is written."""
        if attempt.writer_owns:
            attempt.writer_owns = False
            del self._by_grant[attempt.grant_id]
            self._loop.unpin(attempt.reservation.blocks, attempt.reservation.state_slot)
        self._forget_if_free(attempt)

    def written_by(self, writer: object) -> list[Attempt]:
        """Attempts that this peer may still write."""
        return [a for a in self._by_grant.values() if a.writer is writer]

    def _written(self, xid: Xid) -> Attempt | None:
        """The attempt, while its writer has a grant."""
        attempt = self._by_key.get(xid.key)
        if attempt is None or not attempt.writer_owns or attempt.stage is Stage.ABORTING:
            return None
        return attempt

    def _forget_if_free(self, attempt: Attempt) -> None:
        if attempt.stage is Stage.ABORTING and not attempt.writer_owns:
            attempt.stage = Stage.GONE
            del self._by_key[attempt.xid.key]

    def _check_unit(self, attempt: Attempt, header: UnitHeader) -> None:
        key, size = attempt.xid.key, self._runner.layout.block_tokens
        prompt_len = attempt.reservation.prompt_len
        if header.group == GROUP_BLOCKS:
            first, end = header.block_first, header.block_first + header.block_count
            tokens = min(prompt_len, end * size) - first * size
            if not (0 <= first < end <= len(attempt.reservation.blocks)) or (
                header.nbytes != header.block_count * self._runner.layout.block_bytes
                or (header.token_first, header.token_count) != (first * size, tokens)
            ):
                raise TransferError(f"unit {header.unit} of {key} does not fit its reservation")
            if first < attempt.loading:
                raise TransferError(f"unit {header.unit} writes blocks of {key} that are loaded")
            if not attempt.blocks_written.isdisjoint(range(first, end)):
                raise TransferError(f"unit {header.unit} writes blocks of {key} a second time")
        elif header.group == GROUP_STATE:
            first, end = header.block_first, header.block_first + header.nbytes
            fits = 0 <= first <= end <= self._runner.layout.state_bytes
            if not fits or (header.token_first, header.token_count) != (0, prompt_len):
                raise TransferError(f"unit {header.unit} of {key} does not fit the state slot")
            if any(first < b and a < end for a, b in attempt.state_ranges):
                raise TransferError(f"unit {header.unit} writes the state of {key} a second time")
        else:
            raise TransferError(f"unit {header.unit} of {key} has unknown group {header.group}")

    def _views(self, attempt: Attempt, header: UnitHeader) -> Sequence[memoryview]:
        reserved = attempt.reservation
        if header.group == GROUP_STATE:
            first, end = header.block_first, header.block_first + header.nbytes
            return [self._runner.state_bytes(reserved.state_slot)[first:end]]
        first, end = header.block_first, header.block_first + header.block_count
        return [self._runner.block_bytes(b) for b in reserved.blocks[first:end]]

    def _count(self, attempt: Attempt, header: UnitHeader) -> None:
        first = header.block_first
        if header.group == GROUP_STATE:
            attempt.state_ranges.append((first, first + header.nbytes))
        else:
            attempt.blocks_written.update(range(first, first + header.block_count))

    def _covered(self, attempt: Attempt) -> bool:
        state = sum(end - first for first, end in attempt.state_ranges)
        return (
            len(attempt.blocks_written) == len(attempt.reservation.blocks)
            and state == self._runner.layout.state_bytes
        )

    def _settle(self, attempt: Attempt) -> None:
        commit = attempt.commit
        if commit is None or attempt.stage is not Stage.COMMITTED:
            return
        if attempt.units_seen > commit.n_units or (
            attempt.units_seen == commit.n_units
            and (attempt.combined != commit.digest or not self._covered(attempt))
        ):
            raise TransferError(
                f"{attempt.xid.key}: {attempt.units_seen} units arrived of {commit.n_units}, and "
                "they are not what prefill committed"
            )
        if attempt.units_seen == commit.n_units:
            attempt.stage = Stage.READY
            self.revoke(attempt)
