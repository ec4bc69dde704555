"""Where a model computes. One value goes from the command line to pools, weights and operators."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """`name` as torch spells it. Nothing else in this package names a device."""

    name: str = "cpu"

    @property
    def kind(self) -> str:
        """The part before a number: what operators are chosen by."""
        return self.name.partition(":")[0]

    @staticmethod
    def parse(text: str) -> Device:
        """Raises ConfigError for a device that no model of this runtime computes on."""
        if text == CPU.name:
            return CPU
        raise ConfigError(
            f"device must be {CPU.name!r}: this runtime computes on the CPU alone, a GPU would "
            f"stay idle; got {text!r}"
        )


CPU = Device()
