"""Settings of the registry, read once from the environment or handed in by the program.

``DEEPINFER_KERNELS``         ``op=backend,op=backend`` or a bare ``backend`` for every operator
``DEEPINFER_KERNELS_STRICT``  ``1``: falling back to a slower back end is an error
``DEEPINFER_KERNELS_CHECK``   ``1``: `registry.resolve` hands out the functions with shape checks
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from deepinfer_kernels.errors import ConfigError

__all__ = ["KernelConfig"]

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Which back end to prefer. ``per_op`` wins over ``backend``; None leaves the choice open."""

    backend: str | None = None
    per_op: Mapping[str, str] = field(default_factory=dict[str, str])
    strict: bool = False
    checked: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> KernelConfig:
        """Read both variables. Names of operators and back ends are checked by the registry."""
        env = os.environ if env is None else env
        backend: str | None = None
        per_op: dict[str, str] = {}
        for item in env.get("DEEPINFER_KERNELS", "").split(","):
            left, equals, right = (part.strip() for part in item.partition("="))
            if not equals:
                backend = left or backend
            elif left and right:
                per_op[left] = right
            else:
                raise ConfigError(
                    f"DEEPINFER_KERNELS wants op=backend,... or a back end, got {item.strip()!r}"
                )
        return cls(
            backend=backend,
            per_op=per_op,
            strict=_flag(env, "DEEPINFER_KERNELS_STRICT"),
            checked=_flag(env, "DEEPINFER_KERNELS_CHECK"),
        )


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value not in _TRUE | _FALSE:
        raise ConfigError(f"{name} wants 0 or 1, got {value!r}")
    return value in _TRUE
