"""Messages between the leader of a group and its members: msgpack behind a length, over pipes."""

from __future__ import annotations

import os
import struct
from typing import Any, cast

import msgpack

from deepinfer_engine.errors import EngineLost

_LENGTH = struct.Struct("<Q")
MOST_BYTES = 1 << 30
"""Beyond it a length is damage and no message."""


class Channel:
    """Two ends of pipes. Calls block; end of file means that the other process is gone."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write

    def send(self, body: dict[str, Any]) -> None:
        """Raises EngineLost where nobody reads any more."""
        data = cast("bytes", msgpack.packb(body))
        view = memoryview(_LENGTH.pack(len(data)) + data)
        try:
            while view:
                view = view[os.write(self._write, view) :]
        except OSError as error:
            raise EngineLost(f"a process of the expert group is gone: {error.strerror}") from error

    def receive(self) -> dict[str, Any] | None:
        """The next message; None at the end. Raises EngineLost for what is no message."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MOST_BYTES:
            raise EngineLost(f"a message of {length} bytes between processes of a group: damaged")
        data = self._exactly(length)
        body = None if data is None else msgpack.unpackb(data)
        if body is not None and not isinstance(body, dict):
            raise EngineLost("a message between processes of a group is no map: damaged")
        return body

    def close(self) -> None:
        """Both ends of this side."""
        for descriptor in (self._read, self._write):
            os.close(descriptor)

    def _exactly(self, length: int) -> bytes | None:
        parts: list[bytes] = []
        while length:
            part = os.read(self._read, min(length, 1 << 20))
            if not part:
                return None
            parts.append(part)
            length -= len(part)
        return b"".join(parts)
