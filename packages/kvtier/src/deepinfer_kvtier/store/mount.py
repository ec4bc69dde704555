"""Settings of a store on a mounted shared file system."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Mode = Literal["embedded", "shared-fs"]


class MountSettings(BaseModel):
    """How machines on one mount keep in touch, in seconds, and how they write.

    poll_s:        between two looks at the logs of the others; a block is visible that much later.
    heartbeat_s:   between two signs of life of a writer.
    adopt_after_s: without a sign of life until a writer is taken for dead and its log is finished
                   by another machine.
    grace_s:       between the tombstone of a segment and the deletion of its file; twice as long as
                   the leases in use. For half of it machines that knew the records find them still.
    listing_s:     at least, between two listings of the directory.

    segment_files: segments of each class that a writer fills at a time, side by side: a mount
                   serialises the writes to one file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    poll_s: float = Field(default=0.25, gt=0)
    heartbeat_s: float = Field(default=5.0, gt=0)
    adopt_after_s: float = Field(default=600.0, gt=0)
    grace_s: float = Field(default=120.0, ge=0)
    listing_s: float = Field(default=30.0, ge=0)
    segment_files: int = Field(default=2, ge=1, le=16)

    @model_validator(mode="after")
    def _patience(self) -> MountSettings:
        if self.adopt_after_s < 10 * max(self.heartbeat_s, self.poll_s):
            raise ValueError(
                "adopt_after_s must be at least ten times heartbeat_s and poll_s, got"
                f" {self.adopt_after_s}, {self.heartbeat_s} and {self.poll_s}"
            )
        return self
