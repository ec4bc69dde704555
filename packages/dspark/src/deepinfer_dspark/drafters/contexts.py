"""What a drafter keeps of each request's committed tokens, padded to one length for a batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from deepinfer_dspark.drafting import DraftBatch
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.torch_extra import Tensor, functional, torch

Entries = list[tuple[Tensor, ...]]
"""One tuple of tensors [n, ...] (keys, values, ...) a draft layer; n is the same everywhere."""


class Contexts:
    """Attention entries by request; appended, never written in place, so a fork shares them.

    window: keep only the last `window` entries of a request (sliding-window layers), or all.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        self._entries: dict[Hashable, Entries] = {}
        self._end: dict[Hashable, int] = {}

    def __contains__(self, request: Hashable) -> bool:
        return request in self._entries

    def end(self, request: Hashable) -> int:
        """Position after the last entry of the request; 0 where there is none."""
        return self._end.get(request, 0)

    def append(self, request: Hashable, new: Entries) -> None:
        """Add entries of the positions that follow the last one."""
        self._end[request] = self.end(request) + new[0][0].shape[0]
        held = self._entries.get(request)
        if held is not None:
            new = [
                tuple(torch.cat([a, b]) for a, b in zip(old, more, strict=True))
                for old, more in zip(held, new, strict=True)
            ]
        if self._window is not None:
            new = [tuple(t[-self._window :] for t in layer) for layer in new]
        self._entries[request] = new

    def padded(self, requests: Sequence[Hashable]) -> tuple[Entries, Tensor]:
        """Entries of every layer as [R, n, ...], and which of them exist: bool [R, n]."""
        held = [self._entries[r] for r in requests]
        counts = torch.tensor([h[0][0].shape[0] for h in held])
        top = int(counts.max())

        def stack(layer: int, part: int) -> Tensor:
            rows = [h[layer][part] for h in held]
            return torch.stack(
                [functional.pad(x, (0, 0) * (x.dim() - 1) + (0, top - x.shape[0])) for x in rows]
            )

        first = held[0]
        out = [tuple(stack(j, i) for i in range(len(first[j]))) for j in range(len(first))]
        return out, torch.arange(top)[None, :] < counts[:, None]

    def drop(self, request: Hashable) -> None:
        """Forget a request."""
        self._entries.pop(request, None)
        self._end.pop(request, None)

    def fork(self, request: Hashable, new_id: Hashable) -> None:
        """`new_id` continues from the request's entries."""
        if request in self._entries:
            self._entries[new_id] = list(self._entries[request])
            self._end[new_id] = self._end[request]


def new_features(batch: DraftBatch, contexts: Contexts) -> list[tuple[int, Tensor, Tensor]]:
    """Features that each request brings: (index in the batch, rows [n, m*d], positions [n]).

    Raises ShapeError where they do not continue the request's context up to its anchor.
    """
    if batch.features is None or batch.feature_cu is None:
        return []
    found: list[tuple[int, Tensor, Tensor]] = []
    for i, request in enumerate(batch.request_ids):
        rows = slice(int(batch.feature_cu[i]), int(batch.feature_cu[i + 1]))
        if rows.stop == rows.start:
            continue
        start, end = contexts.end(request), int(batch.positions[i])
        if start + rows.stop - rows.start != end:
            raise ShapeError(
                f"request {request!r} has {start} context entries and brings "
                f"{rows.stop - rows.start}, but its anchor stands at {end}: features must cover "
                "every position below the anchor"
            )
        found.append((i, torch.as_tensor(batch.features[rows]), torch.arange(start, end)))
    return found
