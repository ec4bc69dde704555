"""Errors of the package: misuse raises, "not there" and "not now" are return values.

::

    KVTierError
    ├── ConfigError        a setting, layout or argument that cannot work    (operator or caller)
    ├── BufferShapeError   a buffer that does not fit the layout             (caller)
    ├── UncacheableInput   no safe identity: never store or match            (caller decides)
    ├── StoreFormatError   the directory belongs to another format version   (operator)
    └── ClosedError        the cache was closed before this call             (caller)

Failures of storage are never exceptions on `match`, `load` or `put`: they come back as a shorter
prefix, a `Status` per block, or a refusal with its reason.
"""

from __future__ import annotations


class KVTierError(Exception):
    """Root of this package's errors; the tree is drawn in the module docstring."""


class ConfigError(KVTierError, ValueError):
    """A configuration, layout or namespace argument that cannot work."""


class BufferShapeError(KVTierError, ValueError):
    """A source or destination buffer does not have the bytes the layout asks for."""


class UncacheableInput(KVTierError, ValueError):  # noqa: N818 - the name says what it is about
    """The input has no safe identity, for example an image span without a content digest.

    Falling back to token ids alone would let two different images share a cache entry.
    """


class StoreFormatError(KVTierError):
    """The directory holds another format version, or its identity files are damaged."""


class ClosedError(KVTierError, RuntimeError):
    """The cache was closed before this call."""
