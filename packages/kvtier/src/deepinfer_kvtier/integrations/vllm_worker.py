"""Worker side of the vLLM connector: copies between vLLM's paged tensors and the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.integrations.vllm_config import Geometry, Scopes
from deepinfer_kvtier.integrations.vllm_scheduler import Transfer


class WorkerSide:
    """Loads before a step, saves at its end; both have ended when the call returns."""

    def __init__(self, scopes: Scopes, geometry: Geometry) -> None:
        self._scopes = scopes
        self._geometry = geometry
        self._shard = geometry.rank if geometry.shards > 1 else 0
        self._layers: list[tuple[torch.Tensor, int]] = []
        self.failed_blocks: set[int] = set()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take vLLM's tensors. raises: ConfigError where their pages are not what was planned."""
        self._layers = []
        for name, page in zip(self._geometry.layers, self._geometry.pages, strict=True):
            tensor = kv_caches.get(name)
            if tensor is None:
                raise kvtier.ConfigError(f"vLLM registered no KV cache for layer {name}")
            count = self._geometry.num_blocks
            dims = [dim for dim in (0, 1) if dim < tensor.dim() and tensor.shape[dim] == count]
            if not dims or tensor.numel() * tensor.element_size() != page * count:
                raise kvtier.ConfigError(
                    f"layer {name}: expected {count} pages of {page} bytes along dimension 0 or 1,"
                    f" got shape {tuple(tensor.shape)} of {tensor.dtype}"
                )
            self._layers.append((tensor, dims[0]))

    def load(self, transfers: Sequence[Transfer]) -> None:
        """Fill vLLM's blocks; those that could not be filled are in `failed_blocks`."""
        for transfer in transfers:
            digests = transfer.digests[self._shard]
            ns = self._scopes.namespace(transfer.scope, self._shard)
            n_tokens = len(digests) * self._geometry.block_tokens
            with ns.match(
                range(n_tokens), digests=digests, want=("block",), leave_last=False
            ) as match:
                rows = self._rows(match.n_blocks)
                good = ns.load(match, dst=rows.numpy(), wait=True).wait().ok_prefix
            per = self._geometry.per
            ids = transfer.block_ids
            self._scatter(rows[:good], ids[: good * per], transfer.skip)
            self.failed_blocks.update(ids[max(good * per, transfer.skip) :])

    def save(self, transfers: Sequence[Transfer]) -> None:
        """Copy vLLM's blocks out and hand them to the cache, which writes behind."""
        if self._geometry.writer_only and self._geometry.rank != 0:
            return
        for transfer in transfers:
            ns = self._scopes.namespace(transfer.scope, self._shard)
            ns.put(
                transfer.digests[self._shard],
                self._gather(transfer.block_ids).numpy(),
                parents=transfer.parents[self._shard],
                first_block=transfer.first_block,
                cls=transfer.cls,
            )

    def taken_failures(self) -> set[int]:
        """vLLM blocks whose load failed since the last call."""
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def _rows(self, n_blocks: int) -> torch.Tensor:
        """Staging: (n_blocks, payload) uint8, pinned where there is a device to copy to."""
        size = self._geometry.layout.payload_bytes("block")
        device = self._layers[0][0].device.type if self._layers else "cpu"
        return torch.empty((n_blocks, size), dtype=torch.uint8, pin_memory=device == "cuda")

    def _gather(self, block_ids: Sequence[int]) -> torch.Tensor:
        per = self._geometry.per
        rows = self._rows(len(block_ids) // per)
        at = 0
        for (tensor, dim), page in zip(self._layers, self._geometry.pages, strict=True):
            ids = torch.tensor(block_ids, dtype=torch.long, device=tensor.device)
            pages = tensor.view(torch.uint8).index_select(dim, ids).movedim(dim, 0)
            rows[:, at : at + per * page].copy_(pages.reshape(len(rows), per * page))
            at += per * page
        return rows

    def _scatter(self, rows: torch.Tensor, block_ids: Sequence[int], skip: int) -> None:
        ids_left = block_ids[skip:]
        if not ids_left:
            return
        per = self._geometry.per
        at = 0
        for (tensor, dim), page in zip(self._layers, self._geometry.pages, strict=True):
            # As bytes: an index copy exists for them whatever the cache's number format.
            moved = tensor.view(torch.uint8).movedim(dim, 0)
            flat = rows[:, at : at + per * page].reshape(len(block_ids), page)[skip:]
            pages = flat.reshape(len(ids_left), *moved.shape[1:])
            ids = torch.tensor(ids_left, dtype=torch.long, device=tensor.device)
            moved.index_copy_(0, ids, pages.to(tensor.device))
            at += per * page
