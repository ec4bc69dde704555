"""Lists of token ids per request as two flat arrays, so that nothing loops over requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.errors import ShapeError


@dataclass(frozen=True, slots=True)
class RaggedIds:
    """Token ids of R requests.

    cu:     int64 [R+1]; request r owns entries cu[r]..cu[r+1]-1.
    ids:    int64 [N].
    values: float64 [N] or None; a number for every id (bias, count).
    """

    cu: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.cu.ndim != 1 or self.cu.size == 0 or int(self.cu[-1]) != self.ids.size:
            raise ShapeError(
                f"RaggedIds wants cu [R+1] ending at {self.ids.size} (the number of ids), got "
                f"shape {self.cu.shape} ending at {self.cu[-1] if self.cu.size else 'nothing'}"
            )
        if self.values is not None and self.values.shape != self.ids.shape:
            raise ShapeError(
                f"RaggedIds wants one value an id ({self.ids.shape}), got {self.values.shape}"
            )

    @classmethod
    def of(
        cls, lists: Sequence[Sequence[int]], values: Sequence[Sequence[float]] | None = None
    ) -> RaggedIds:
        """From one list of ids (and optionally one list of values) a request.

        Raises ShapeError when the lists are not lists of numbers or their lengths differ.
        """
        try:
            if values is not None and [len(x) for x in values] != [len(x) for x in lists]:
                raise ShapeError("RaggedIds.of wants as many values as ids in every list")
            return cls._of(lists, values)
        except (TypeError, ValueError) as cause:
            raise ShapeError(f"RaggedIds.of wants one list of ids a request: {cause}") from cause

    @classmethod
    def _of(
        cls, lists: Sequence[Sequence[int]], values: Sequence[Sequence[float]] | None
    ) -> RaggedIds:
        cu = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum([len(x) for x in lists], out=cu[1:])
        ids = np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=int(cu[-1]))
        flat = (
            None
            if values is None
            else np.fromiter(chain.from_iterable(values), dtype=np.float64, count=int(cu[-1]))
        )
        return cls(cu, ids, flat)

    @property
    def requests(self) -> int:
        return self.cu.size - 1

    def select(self, requests: npt.NDArray[np.int64]) -> RaggedIds:
        """The lists of the given requests, in that order."""
        _, entries = self.on_rows(requests)
        cu = np.zeros(requests.size + 1, dtype=np.int64)
        np.cumsum(np.diff(self.cu)[requests], out=cu[1:])
        values = None if self.values is None else self.values[entries]
        return RaggedIds(cu, self.ids[entries], values)

    def owner(self) -> npt.NDArray[np.int64]:
        """int64 [N]; the request of every entry."""
        return np.repeat(np.arange(self.requests, dtype=np.int64), np.diff(self.cu))

    def on_rows(
        self, row_request: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Expand to verify rows: (row of every expanded entry, index of that entry in `ids`).

        row_request: int64 [B]; the request every row of the batch belongs to.
        """
        counts = np.diff(self.cu)[row_request]
        total = int(counts.sum())
        rows = np.repeat(np.arange(row_request.size, dtype=np.int64), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        entries = self.cu[row_request].repeat(counts) + (np.arange(total, dtype=np.int64) - first)
        return rows, entries

    def contains(
        self, request: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Whether request[i] lists ids[i], elementwise; negative ids are never listed."""
        if self.ids.size == 0:
            return np.zeros(ids.shape, dtype=np.bool_)
        stride = np.int64(max(int(self.ids.max()), int(ids.max(initial=0))) + 1)
        listed = np.isin(request * stride + ids, self.owner() * stride + self.ids)
        return listed & (ids >= 0)
