"""Slots of a tensor as source and destination: host tensors in place, device tensors by staging.

Needs the extra [torch].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.errors import BufferShapeError, ConfigError

Ranges = Sequence[tuple[int, int]]


class DevicePool:
    """`count` slots of `stride` bytes in one tensor, as an engine allocates its cache blocks.

    tensor: uint8 [count, stride], rows without gaps inside; on the CPU or a CUDA device.
    raises: ConfigError without torch, BufferShapeError for another shape or type.
    """

    def __init__(self, tensor: Any) -> None:
        torch = _torch()
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8 or tensor.ndim != 2:
            raise BufferShapeError("a pool is a uint8 tensor of shape [count, stride]")
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise BufferShapeError(f"slots must have no gaps inside, got strides {tensor.stride()}")
        self.tensor = tensor
        self.count, self.stride = (int(size) for size in tensor.shape)

    def slots(self, numbers: Sequence[int]) -> PoolSlots:
        """These slots as `dst` of a load or `src` of a put. raises: BufferShapeError."""
        wrong = [number for number in numbers if not 0 <= number < self.count]
        if wrong:
            raise BufferShapeError(f"the pool has slots 0..{self.count - 1}, got {wrong[0]}")
        if len(set(numbers)) < len(numbers):
            raise BufferShapeError("a slot is named twice")
        return PoolSlots(self, tuple(int(number) for number in numbers))


class PoolSlots:
    """Chosen slots of a pool, in order."""

    def __init__(self, pool: DevicePool, numbers: tuple[int, ...]) -> None:
        self.pool = pool
        self.numbers = numbers

    @property
    def on_host(self) -> bool:
        """Whether the slots can be read and written in place."""
        return self.pool.tensor.device.type == "cpu"

    def rows(self) -> list[NDArray[np.uint8]]:
        """The slots in place, uint8 [stride] each; for pools in host memory."""
        flat: NDArray[np.uint8] = self.pool.tensor.numpy()
        return [flat[number] for number in self.numbers]

    def block(self) -> NDArray[np.uint8] | None:
        """The slots in place as uint8 [n, stride] where they follow each other; else None."""
        first = self.numbers[0] if self.numbers else 0
        if self.numbers != tuple(range(first, first + len(self.numbers))):
            return None
        return self.pool.tensor.numpy()[first : first + len(self.numbers)]

    def stage_out(self, payload: int) -> NDArray[np.uint8]:
        """A copy of the first `payload` bytes of each slot in pinned host memory, complete."""
        staging = self._staging(payload)
        staging.copy_(self._device_rows(payload), non_blocking=True)
        _torch().cuda.current_stream(self.pool.tensor.device).synchronize()
        return staging.numpy()

    def stage_in(self, payload: int) -> tuple[NDArray[np.uint8], Callable[[Ranges | None], None]]:
        """Pinned host memory to fill, and the call that brings byte ranges of it to the device.

        The call returns when the device has the bytes; None = all of them.
        """
        staging = self._staging(payload)
        torch = _torch()
        tensor = self.pool.tensor
        index = torch.tensor(self.numbers, dtype=torch.int64, device=tensor.device)
        stream = torch.cuda.Stream(tensor.device)

        def deliver(ranges: Ranges | None) -> None:
            with torch.cuda.stream(stream):
                for offset, size in ((0, payload),) if ranges is None else ranges:
                    columns = slice(offset, offset + size)
                    moved = staging[:, columns].contiguous().to(tensor.device, non_blocking=True)
                    tensor[:, columns].index_copy_(0, index, moved)
            stream.synchronize()

        return staging.numpy(), deliver

    def _staging(self, payload: int) -> Any:
        torch = _torch()
        return torch.empty((len(self.numbers), payload), dtype=torch.uint8, pin_memory=True)

    def _device_rows(self, payload: int) -> Any:
        torch = _torch()
        tensor = self.pool.tensor
        index = torch.tensor(self.numbers, dtype=torch.int64, device=tensor.device)
        return tensor.index_select(0, index)[:, :payload]


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as cause:
        raise ConfigError(
            "device pools need torch: pip install './packages/kvtier[torch]'"
        ) from cause
    return torch
