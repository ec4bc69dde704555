"""Host memory for preempted sequences: their blocks and state slot as bytes, within a limit."""

from __future__ import annotations

from deepinfer_engine.core.runner import StepRunner
from deepinfer_engine.core.sequence import LiveSequence


class HostParking:
    """`core.plan.Parking` on a runner. Exact: what comes back is what was there."""

    def __init__(self, runner: StepRunner, limit_bytes: int) -> None:
        self._runner = runner
        self._limit = limit_bytes
        self._parked: dict[str, tuple[list[bytes], bytes]] = {}

    @property
    def used_bytes(self) -> int:
        layout = self._runner.layout
        return sum(
            len(blocks) * layout.block_bytes + layout.state_bytes
            for blocks, _ in self._parked.values()
        )

    def park(self, seq: LiveSequence) -> bool:
        layout = self._runner.layout
        n_blocks = -(-seq.num_tokens // layout.block_tokens)
        size = n_blocks * layout.block_bytes + layout.state_bytes
        if self.used_bytes + size > self._limit:
            return False
        blocks = [bytes(self._runner.block_bytes(b)) for b in seq.blocks[:n_blocks]]
        self._parked[seq.key] = (blocks, bytes(self._runner.state_bytes(seq.state_slot)))
        return True

    def resume(self, seq: LiveSequence) -> None:
        blocks, state = self._parked.pop(seq.key)
        for block_id, content in zip(seq.blocks, blocks, strict=False):
            self._runner.block_bytes(block_id)[:] = content
        self._runner.state_bytes(seq.state_slot)[:] = state

    def drop(self, seq: LiveSequence) -> None:
        del self._parked[seq.key]
