"""What the small immutable values of a conversation have in common."""

from __future__ import annotations

from typing import Any


def require_str(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"argument '{name}' must be str, got {type(value).__name__}")


class Value:
    """Equality and repr over `__slots__` for small immutable values."""

    __slots__ = ()

    def _key(self) -> tuple[Any, ...]:
        names = [n for c in type(self).__mro__ for n in getattr(c, "__slots__", ())]
        return tuple(getattr(self, n) for n in names)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key() == other._key()  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]  # parameters may hold dicts
