"""Embeddings of pictures on their way to prefill: units of rows, where they land, what is kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from deepinfer_engine.core.pictures import RowForm
from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd import wire
from deepinfer_engine.pd.sending import UNIT_BYTES, Unit
from deepinfer_engine.pd.wire import Body, UnitHeader

GROUP_ROWS = 2


def row_units(grant_id: int, attempt: int, tokens: int, rows: memoryview) -> Iterator[Unit]:
    """Units that carry the rows of one picture."""
    for number, first in enumerate(range(0, len(rows), UNIT_BYTES)):
        part = rows[first : first + UNIT_BYTES]
        header = UnitHeader(
            grant_id=grant_id,
            attempt=attempt,
            group=GROUP_ROWS,
            unit=number,
            block_first=first,
            block_count=0,
            token_first=0,
            token_count=tokens,
            nbytes=len(part),
            digest=wire.unit_digest([part]),
        )
        yield Unit(header, (part,))


class RowLanding:
    """Memory for the rows of one picture, until every byte of it was written exactly once and the
    sender has said so."""

    def __init__(self, attempt: int, tokens: int, form: RowForm) -> None:
        self._attempt = attempt
        self._tokens = tokens
        self._form = form
        self._memory = memoryview(bytearray(tokens * form.row_bytes))
        self._ranges: list[tuple[int, int]] = []
        self._combined = 0

    def unit(self, header: UnitHeader, payload: memoryview) -> None:
        """Raises TransferError for a unit that is not of these rows, or arrived damaged."""
        first, end = header.block_first, header.block_first + header.nbytes
        if (
            header.group != GROUP_ROWS
            or header.attempt != self._attempt
            or (header.token_first, header.token_count) != (0, self._tokens)
            or not first < end <= len(self._memory)
        ):
            raise TransferError(f"unit {header.unit} does not fit the embeddings that were asked")
        if any(first < b and a < end for a, b in self._ranges):
            raise TransferError(f"unit {header.unit} writes embeddings a second time")
        if wire.unit_digest([payload]) != header.digest:
            raise TransferError(f"unit {header.unit} of embeddings arrived damaged")
        self._memory[first:end] = payload
        self._ranges.append((first, end))
        self._combined = wire.add_to_combined(self._combined, header.unit, header.digest)

    def committed(self, body: Body) -> memoryview:
        """The rows, when an EMBEDDED agrees with what landed. Raises TransferError."""
        shape = (body["rows"], body["channels"], body["dtype"])
        wanted = (self._tokens, self._form.rules.channels, self._form.dtype)
        if shape != wanted:
            raise TransferError(f"embeddings of {shape} for a picture of {wanted}")
        covered = sum(end - first for first, end in self._ranges)
        if (body["n_units"], body["digest"]) != (len(self._ranges), self._combined) or (
            covered != len(self._memory)
        ):
            raise TransferError(
                f"{len(self._ranges)} units of embeddings arrived of {body['n_units']}, and they "
                "are not what was sent"
            )
        if not finite(self._memory, self._form.dtype):
            raise TransferError("embeddings that are no finite numbers")
        return self._memory


def finite(rows: memoryview, dtype: str) -> bool:
    """Whether all numbers are."""
    if dtype == "bfloat16":
        exponents = np.frombuffer(rows, dtype="<u2") & 0x7F80
        return bool((exponents != 0x7F80).all())
    return bool(np.isfinite(np.frombuffer(rows, dtype=np.dtype(dtype).newbyteorder("<"))).all())


class RowCache:
    """Embeddings by picture, the least recently used dropped beyond `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: OrderedDict[bytes, memoryview] = OrderedDict()
        self.nbytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, digest: bytes) -> memoryview | None:
        found = self._rows.get(digest)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._rows.move_to_end(digest)
        return found

    def put(self, digest: bytes, rows: memoryview) -> None:
        if len(rows) > self._limit:
            return
        self._drop(digest)
        self._rows[digest] = rows
        self.nbytes += len(rows)
        while self.nbytes > self._limit:
            self._drop(next(iter(self._rows)))

    def _drop(self, digest: bytes) -> None:
        dropped = self._rows.pop(digest, None)
        if dropped is not None:
            self.nbytes -= len(dropped)
