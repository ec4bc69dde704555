"""How long classes of traffic are kept, and which class a request belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepinfer_kvtier.errors import ConfigError

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class RetentionClass:
    """Lifetime of one class of traffic.

    ttl_s: seconds after the last hit until a record may go; None = never expires.
    code:  number of the class in records on disk, 0..255, unique in one store.
    """

    code: int
    ttl_s: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.code <= 255 or (self.ttl_s is not None and self.ttl_s <= 0):
            raise ConfigError(
                f"a class needs a code in 0..255 and a ttl above 0, got {self.code}, {self.ttl_s}"
            )

    def is_over(self, unused_s: float) -> bool:
        """Whether a record that nobody has used for so long may go."""
        return self.ttl_s is not None and unused_s >= self.ttl_s


DEFAULT_CLASSES: dict[str, RetentionClass] = {
    "scratch": RetentionClass(code=0, ttl_s=1 * HOUR_S),
    "agent": RetentionClass(code=1, ttl_s=72 * HOUR_S),
    "chat": RetentionClass(code=2, ttl_s=168 * HOUR_S),
    "pin": RetentionClass(code=3, ttl_s=None),
}

_CLASS_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")


def check_class_name(name: str) -> None:
    """Class names become part of file names, so only short lower-case words are legal."""
    if not _CLASS_NAME.fullmatch(name):
        raise ConfigError(f"a class name must match {_CLASS_NAME.pattern}, got {name!r}")


def traffic_class(
    *,
    explicit: str | None = None,
    may_choose: bool = False,
    tools: bool = False,
    tool_results: bool = False,
) -> str:
    """Class of a request: the caller's own choice where its key allows one, else by its content.

    explicit:     class named in the request; ignored unless `may_choose`.
    tools:        the request declares tools.
    tool_results: the request carries results of earlier tool calls.
    returns:      "agent" with tools or tool results, else "chat".
    """
    if explicit is not None and may_choose:
        return explicit
    return "agent" if tools or tool_results else "chat"
