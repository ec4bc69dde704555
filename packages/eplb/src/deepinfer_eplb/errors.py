"""Errors of this package.

EplbError
├── ShapeError      an array has not the documented shape or dtype
├── TopologyError   slots, ranks, nodes or groups do not fit together
├── LoadError       loads are negative or not finite
├── PlanError       a placement is not valid (missing expert, id out of range)
├── CommitError     a rank could not switch a layer: every rank went back to the old one
└── TransportError  a peer sent something other than the movement plan says
    └── PeerLostError   a peer died, stopped or did not answer within the deadline
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


class PeerLostError(TransportError):
    """A peer died, stopped or did not answer within the deadline; the old maps are in force."""


class CommitError(EplbError):
    """A rank could not switch a layer; every rank holds the old weights and maps of it."""
