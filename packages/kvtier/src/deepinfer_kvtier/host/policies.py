"""Eviction policies by name, as `module:Class`, or as the caller's own object."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.host.eviction import EvictionPolicy, Lru, TailLru
from deepinfer_kvtier.host.session_policy import SessionAware

ONLINE: Final[dict[str, Callable[[], EvictionPolicy]]] = {
    "lru": Lru,
    "tail-lru": TailLru,
    "session": SessionAware,
}
"""Policies that know only the past, so that host memory can use them."""

_METHODS = ("used", "entered", "left", "victim")


def make_policy(policy: str | Callable[[], Any]) -> EvictionPolicy:
    """A fresh policy: by name, as `module:Class`, or from what makes one.

    raises: ConfigError when there is none, or when it is none.
    """
    maker = _find(policy) if isinstance(policy, str) else policy
    try:
        made: Any = maker()
    except Exception as cause:
        raise ConfigError(f"{policy!r} makes no policy: {cause!r}") from cause
    missing = [name for name in _METHODS if not callable(getattr(made, name, None))]
    if missing:
        raise ConfigError(
            f"an eviction policy has the methods {_METHODS}, {made!r} lacks {missing}"
        )
    return made


def _find(name: str) -> Callable[[], Any]:
    if name in ONLINE:
        return ONLINE[name]
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(
            f"unknown policy {name!r}: use one of {', '.join(ONLINE)}, module:Class of your own,"
            " or, in the simulator, oracle"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as cause:
        raise ConfigError(f"cannot load the policy {name!r}: {cause!r}") from cause
    if not callable(found):
        raise ConfigError(f"the policy {name!r} is no class and no function")
    return found


def policy_name(policy: EvictionPolicy) -> str:
    """What statistics call a policy: its name here, else that of its class."""
    names = (name for name, made_by in ONLINE.items() if type(policy) is made_by)
    return next(names, type(policy).__name__)
