"""Which way bytes take between segments and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, get_args

from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.io import IoEngine, PosixIo

IoName = Literal["posix", "odirect", "usrbio"]
IO_NAMES: Final = get_args(IoName)


def build_io(name: IoName, path: Path | None) -> IoEngine:
    """The engine of that name for a store at `path`. raises: ConfigError."""
    if name == "odirect":
        from deepinfer_kvtier.store.direct import DirectIo

        return DirectIo()
    if name == "usrbio":
        from deepinfer_kvtier.store.usrbio import UsrbioIo

        if path is None:
            raise ConfigError("io='usrbio' needs a path on a 3FS mount, got none")
        return UsrbioIo(path)
    return PosixIo()
