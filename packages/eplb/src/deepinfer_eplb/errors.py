"""Errors of this package.

EplbError
├── ShapeError      an array has not the documented shape or dtype
├── TopologyError   slots, ranks, nodes or groups do not fit together
├── LoadError       loads are negative or not finite
├── PlanError       a placement is not valid (missing expert, id out of range)
└── TransportError  a peer sent something other than the movement plan says
"""

from __future__ import annotations


class EplbError(Exception):
    """Root of this package's errors."""


class ShapeError(EplbError, ValueError):
    """An array has not the documented shape or dtype."""


class TopologyError(EplbError, ValueError):
    """Slots, ranks, nodes or groups do not fit together."""


class LoadError(EplbError, ValueError):
    """Loads are negative or not finite."""


class PlanError(EplbError, ValueError):
    """A placement is not valid."""


class TransportError(EplbError):
    """A peer sent something other than the movement plan says."""
