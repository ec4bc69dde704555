"""How large a picture becomes, and how many tokens it takes (V4.1).

One patch is 14 x 14 pixels; one token covers 3 x 3 patches. Each row of tokens ends with one
more token, and two mark the start and the end. A picture is enlarged to at least 544 x 544
pixels of area and shrunk to at most 1024 tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer_recipe.base.errors import CalcResizeError

_MARK_TOKENS = 2
_MAX_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class ImageSizeRule:
    """How a model fits pictures; the defaults are the released model's.

    patch_px: side of a patch. patches_per_token_side: patches along a side of a token.
    min_area_px, max_tokens: smaller pictures are enlarged, larger ones shrunk.
    max_aspect: width over height beyond which a picture is squeezed to that shape.
    """

    patch_px: int = 14
    patches_per_token_side: int = 3
    min_area_px: int = 544 * 544
    max_tokens: int = 1024
    max_aspect: float | None = None

    def patch_tokens(self, patches_wide: int, patches_high: int) -> int:
        """Tokens of a picture of so many patches."""
        rows = -(-patches_high // self.patches_per_token_side)
        columns = -(-patches_wide // self.patches_per_token_side)
        return rows * (columns + 1) + _MARK_TOKENS

    def fitted_patches(self, width: int, height: int) -> tuple[int, int]:
        """Patches (wide, high) of a picture of `width` x `height` pixels after fitting.

        Raises `ValueError` for an empty picture, `CalcResizeError` if fitting does not converge.
        """
        if width < 1 or height < 1:
            raise ValueError(f"a picture has at least one pixel a side, got {width} x {height}")
        if self.max_aspect is not None and width > height * self.max_aspect:
            width = max(1, int(height * self.max_aspect))
        aspect = width / height
        width, height = self._enlarged(width, height)
        wide, high = math.ceil(width / self.patch_px), math.ceil(height / self.patch_px)
        if self.patch_tokens(wide, high) <= self.max_tokens:
            return wide, high
        # Rows r and columns a*r of tokens such that r * (a*r + 1) + 2 is about the most allowed.
        room = self.max_tokens - _MARK_TOKENS
        root = (-1 + math.sqrt(1 + 4 * aspect * room)) / (2 * aspect)
        rows, columns = math.floor(root), math.floor(aspect * root)
        if rows < 1:
            rows, columns = 1, room - 1
        if columns < 1:
            columns, rows = 1, room // 2
        token_px = self.patch_px * self.patches_per_token_side
        scale = min(token_px * columns / width, token_px * rows / height)
        wide = max(1, math.floor(width * scale) // self.patch_px)
        high = max(1, math.floor(height * scale) // self.patch_px)
        return wide, high

    def fitted_size(self, width: int, height: int) -> tuple[int, int]:
        """Size in pixels (width, height) that a picture is resized to."""
        wide, high = self.fitted_patches(width, height)
        return wide * self.patch_px, high * self.patch_px

    def image_tokens(self, width: int, height: int) -> int:
        """Tokens of a picture of `width` x `height` pixels."""
        return self.patch_tokens(*self.fitted_patches(width, height))

    def _enlarged(self, width: int, height: int) -> tuple[int, int]:
        if width * height >= self.min_area_px:
            return width, height
        for _ in range(_MAX_ROUNDS):
            scale = math.sqrt(self.min_area_px / (width * height))
            before = width, height
            width = max(1, math.floor(width * scale))
            height = max(1, math.floor(height * scale))
            patches = math.ceil(width / self.patch_px) * math.ceil(height / self.patch_px)
            enough = patches * self.patch_px * self.patch_px >= self.min_area_px
            # Rounding down may stop just short of the area; then that is what it is.
            if enough or before == (width, height):
                return width, height
        raise CalcResizeError(f"enlarging a {width} x {height} picture does not converge")


RELEASED = ImageSizeRule()
MAX_TOKENS = RELEASED.max_tokens


def fitted_size(width: int, height: int) -> tuple[int, int]:
    """Size in pixels (width, height) that the released model's pictures are resized to."""
    return RELEASED.fitted_size(width, height)


def image_tokens(width: int, height: int) -> int:
    """Tokens of a picture of `width` x `height` pixels in the released model."""
    return RELEASED.image_tokens(width, height)


def limited_size(width: int, height: int, max_side: int) -> tuple[int, int]:
    """Size whose longer side is at most `max_side`, of the same shape."""
    longer = max(width, height)
    if longer <= max_side:
        return width, height
    scale = max_side / longer
    return max(1, round(width * scale)), max(1, round(height * scale))
