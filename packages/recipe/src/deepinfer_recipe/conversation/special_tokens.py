"""The special tokens of the DeepSeek V4 family of prompt formats and their spellings."""

from __future__ import annotations

from enum import Enum
from typing import Final

IMAGE_SPECIAL_TOKEN_ID: Final = 129264
"""Id of `<｜image｜>` in the V4.1 vocabulary."""


class SpecialToken(Enum):
    """A kind of special token; the value is its default spelling."""

    Bos = "<｜begin▁of▁sentence｜>"
    Eos = "<｜end▁of▁sentence｜>"
    ThinkingStart = "<think>"
    ThinkingEnd = "</think>"
    System = "<｜System｜>"
    User = "<｜User｜>"
    Assistant = "<｜Assistant｜>"
    LatestReminder = "<｜latest_reminder｜>"
    # Without angle brackets: in `<｜DSML｜ calls>` only the middle is one token.
    Dsml = "｜DSML｜"
    Image = "<｜image｜>"
    Ref = "<｜ref｜>"
    RefEnd = "<｜/ref｜>"
    Box = "<｜box｜>"
    BoxEnd = "<｜/box｜>"
    Point = "<｜point｜>"
    PointEnd = "<｜/point｜>"
    Polygon = "<｜polygon｜>"
    PolygonEnd = "<｜/polygon｜>"

    # Members are single; Enum's own hash of the name is Python code in the renderer's way.
    __hash__ = object.__hash__

    def default_str(self) -> str:
        """Return the default literal spelling of this token."""
        return self.value

    def __repr__(self) -> str:
        return f"SpecialToken.{self.name}"


class Spelling(str):
    """A special token where the renderer put it; text of this type is never what a user typed."""

    __slots__ = ()


class SpecialTokens:
    """A mapping from each `SpecialToken` to its spelling.

    Every keyword defaults to the default spelling of its token, so only overridden tokens
    need to be supplied. An empty spelling raises `ValueError`.
    """

    __slots__ = ("marks", "spellings")

    def __init__(
        self,
        *,
        bos: str | None = None,
        eos: str | None = None,
        thinking_start: str | None = None,
        thinking_end: str | None = None,
        system: str | None = None,
        user: str | None = None,
        assistant: str | None = None,
        latest_reminder: str | None = None,
        dsml: str | None = None,
        image: str | None = None,
        ref: str | None = None,
        ref_end: str | None = None,
        box: str | None = None,
        box_end: str | None = None,
        point: str | None = None,
        point_end: str | None = None,
        polygon: str | None = None,
        polygon_end: str | None = None,
    ) -> None:
        given = {
            SpecialToken.Bos: bos,
            SpecialToken.Eos: eos,
            SpecialToken.ThinkingStart: thinking_start,
            SpecialToken.ThinkingEnd: thinking_end,
            SpecialToken.System: system,
            SpecialToken.User: user,
            SpecialToken.Assistant: assistant,
            SpecialToken.LatestReminder: latest_reminder,
            SpecialToken.Dsml: dsml,
            SpecialToken.Image: image,
            SpecialToken.Ref: ref,
            SpecialToken.RefEnd: ref_end,
            SpecialToken.Box: box,
            SpecialToken.BoxEnd: box_end,
            SpecialToken.Point: point,
            SpecialToken.PointEnd: point_end,
            SpecialToken.Polygon: polygon,
            SpecialToken.PolygonEnd: polygon_end,
        }
        self.spellings: dict[SpecialToken, str] = {
            token: token.value if spelling is None else spelling
            for token, spelling in given.items()
        }
        for token, spelling in self.spellings.items():
            if not spelling:
                raise ValueError(f"the spelling of {token!r} must not be empty")
        self.marks: dict[SpecialToken, Spelling] = {
            token: Spelling(spelling) for token, spelling in self.spellings.items()
        }

    def token(self, token: SpecialToken) -> str:
        """Return the spelling of `token` in this mapping."""
        return self.spellings[token]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecialTokens) and self.spellings == other.spellings

    def __hash__(self) -> int:
        return hash(tuple(self.spellings.values()))

    def __repr__(self) -> str:
        changed = {t.name: s for t, s in self.spellings.items() if s != t.value}
        return f"SpecialTokens({changed})"


DEFAULT_SPECIAL_TOKENS: Final = SpecialTokens()
