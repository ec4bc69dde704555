"""The vision tower of a checkpoint, without the rest of the model: what an encode worker runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepinfer_engine.core.device import CPU, Device
from deepinfer_engine.core.pictures import Picture, PictureRules
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.model.family import LoadOptions, Tower
from deepinfer_engine.model.placement import tensors_on
from deepinfer_engine.model.registry import family_of


def build_encoder(
    model_dir: Path, *, dtype: str, device: Device = CPU, batch_invariant: bool = False
) -> PictureEncoder:
    """Read the vision weights of a checkpoint directory, and no others.

    Raises ConfigError for an unusable argument or a model that takes no pictures, CheckpointError
    for an unusable directory.
    """
    family = family_of(model_dir)
    load_tower = getattr(family, "load_tower", None)
    if load_tower is None:
        raise ConfigError(f"{family.name} models take no pictures: there is nothing to encode")
    options = LoadOptions(dtype, device=device, batch_invariant=batch_invariant)
    with tensors_on(device):
        return PictureEncoder(load_tower(model_dir, options), device)


class PictureEncoder:
    """Implements `pd.encode_queue.Encoder`."""

    def __init__(self, tower: Tower, device: Device = CPU) -> None:
        self._tower = tower
        self._device = device

    @property
    def rules(self) -> PictureRules:
        return self._tower.rules

    def encode(self, pictures: Sequence[Picture]) -> list[memoryview]:
        """The bytes of each picture's rows, encoded together."""
        import torch

        with tensors_on(self._device):
            spans = self._tower.spans(pictures)
        return [span.cpu().contiguous().view(torch.uint8).view(-1).numpy().data for span in spans]
