"""`EngineConfig`: the knobs of the scheduler, in tokens, sequences, bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.core.windows import PersistState
from deepinfer_engine.errors import ConfigError

ALL_WINDOWS = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one worker's scheduler. Pool sizes are not here: they are the runner's `Caps`.

    A runner for `max_num_seqs` sequences wants about `max_num_seqs + max_num_batched_tokens / 128
    + 1` state slots: one for each sequence, the rest for the snapshots of one prefill step.
    """

    max_num_seqs: int = 32
    """Sequences that prefill or decode at a time; on a decode worker reservations count too."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step, prompts and drafts together. At least one block."""
    max_queue: int = 256
    """Requests that may wait for a place; beyond it they are refused with a time to retry."""
    skip_ahead: int = 8
    """How many waiting requests may overtake one that does not fit yet."""
    hol_s: float = 2.0
    """A request overtaken for this long is not overtaken any more."""
    max_gap: float = 3.0
    """Where one runner does both: a step that reads prompts beside running sequences takes at most
    so many times as long as one that does not. 0 = prompts are read in steps of their own, as large
    as they may be; see `prefill_every_steps`."""
    token_target_s: float = 0.0
    """Seconds a token of a running sequence may take: no sequence more is admitted, fewer drafts
    are verified and less of a prompt is read beside them where it would take longer. 0 = none."""
    ttft_target_s: float = 0.0
    """Seconds a first token may take: prompts that can be in time are read before those that
    cannot any more. 0 = none."""
    overlap: bool = False
    """Plan a step while the one before it runs, see `core.overlap`."""
    age_s: float = 30.0
    """A request that waits gains one class of priority each so many seconds; 0 = never."""
    prefill_every_steps: int = 4
    """Where one runner does both, without mixed steps: decode steps between two prefill steps."""
    prefill_urgent_s: float = 0.25
    """... unless the oldest waiting request is this old."""
    decode_reserve_tokens: int = 32
    """Growth kept free for each running sequence when another one is admitted."""
    prompt_windows: int = ALL_WINDOWS
    """Borders at the end of a prompt whose window states are kept for prompts to come."""
    persist_state: PersistState = "last"
    """Which window states go below memory."""
    park_bytes: int = 256 << 20
    """Host memory for preempted sequences; beyond it they are computed again, where a worker only
    decodes they end `insufficient_system_resource`."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "max_queue",
            "skip_ahead",
            "hol_s",
            "max_gap",
            "token_target_s",
            "ttft_target_s",
            "age_s",
            "prefill_every_steps",
            "prefill_urgent_s",
            "decode_reserve_tokens",
            "prompt_windows",
            "park_bytes",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
