"""Errors of this package.

DsparkError
├── ShapeError          an array has not the documented shape, dtype or range   (caller's fault)
├── LosslessnessError   the call would change the law of the output             (caller's fault)
├── CheckpointError     draft weights or their configuration do not fit         (file's fault)
├── TableError          a step-time table is missing, stale or damaged          (file's fault)
└── UnsupportedModelError  a model cannot be a target or drafter: the message says why
"""

from __future__ import annotations


class DsparkError(Exception):
    """Root of this package's errors."""


class ShapeError(DsparkError, ValueError):
    """An array has not the documented shape, dtype or range."""


class LosslessnessError(DsparkError):
    """The request would make verification lossy: the message says what would leak and how."""


class CheckpointError(DsparkError):
    """Draft weights or their configuration do not fit what the drafter needs."""


class TableError(DsparkError):
    """A step-time table is missing, stale or damaged."""


class UnsupportedModelError(DsparkError):
    """A model cannot be used as target or drafter; the message says what it lacks."""
