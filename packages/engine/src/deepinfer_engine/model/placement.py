"""Tensors of a model are made on its device, whatever default device the caller has set."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from deepinfer_engine.core.device import Device


@contextmanager
def tensors_on(device: Device) -> Generator[None]:
    """New tensors of the body are on this device; free where they would be anyway."""
    wanted = torch.device(device.name)
    if torch.get_default_device() == wanted:
        yield
    else:
        with wanted:
            yield
