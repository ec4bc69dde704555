"""Errors of the package.

KernelsError
├── ShapeError          an argument has the wrong shape, dtype or stride   (caller's fault)
├── RecordError         an unknown cache record, or a dimension it cannot hold
├── UnknownOpError      no operator of that name
├── BackendError        the back end asked for does not exist, or refuses this device
├── ExchangeError       a rank of an expert-parallel group was lost, or there is no group
├── FallbackError       strict mode: a slower back end would have been used
├── ConfigError         a setting or environment variable cannot be read
└── NumericsError       verify or bench: a back end disagrees with the reference
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "ConfigError",
    "ExchangeError",
    "FallbackError",
    "KernelsError",
    "NumericsError",
    "RecordError",
    "ShapeError",
    "UnknownOpError",
]


class KernelsError(Exception):
    """Root of this package's errors."""


class ShapeError(KernelsError, ValueError):
    """An argument has the wrong shape, dtype or stride."""


class RecordError(KernelsError, ValueError):
    """A cache record is unknown, or cannot hold the dimension asked for."""


class UnknownOpError(KernelsError, KeyError):
    """No operator of that name is registered."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class BackendError(KernelsError, RuntimeError):
    """The back end asked for does not exist for this operator, or refuses this device."""


class ExchangeError(KernelsError, RuntimeError):
    """A rank of an expert-parallel group was lost or is too late, or there is no group."""


class FallbackError(KernelsError, RuntimeError):
    """Strict mode: a better back end refused, and a slower one would have been used."""


class ConfigError(KernelsError, ValueError):
    """A setting or an environment variable cannot be read."""


class NumericsError(KernelsError, AssertionError):
    """A back end disagrees with the reference beyond the stated tolerance."""
