"""How large a picture becomes, and how many tokens it takes (V4.1).

One patch is 14 x 14 pixels; one token covers 3 x 3 patches. Each row of tokens ends with one
more token, and two mark the start and the end. A picture is enlarged to at least 544 x 544
pixels of area and shrunk to at most 1024 tokens.
"""

from __future__ import annotations

import math

from deepinfer_recipe.errors import CalcResizeError

PATCH_PX = 14
PATCHES_PER_TOKEN_SIDE = 3
MIN_AREA_PX = 544 * 544
MAX_TOKENS = 1024
_MARK_TOKENS = 2
_MAX_ROUNDS = 10
_TOKEN_PX = PATCH_PX * PATCHES_PER_TOKEN_SIDE


def patch_tokens(patches_wide: int, patches_high: int) -> int:
    """Tokens of a picture of so many patches."""
    rows = -(-patches_high // PATCHES_PER_TOKEN_SIDE)
    columns = -(-patches_wide // PATCHES_PER_TOKEN_SIDE)
    return rows * (columns + 1) + _MARK_TOKENS


def _enlarged(width: int, height: int) -> tuple[int, int]:
    if width * height >= MIN_AREA_PX:
        return width, height
    for _ in range(_MAX_ROUNDS):
        scale = math.sqrt(MIN_AREA_PX / (width * height))
        before = width, height
        width = max(1, math.floor(width * scale))
        height = max(1, math.floor(height * scale))
        patches = math.ceil(width / PATCH_PX) * math.ceil(height / PATCH_PX)
        # Rounding down may stop just short of the area; then that is what it is.
        if patches * PATCH_PX * PATCH_PX >= MIN_AREA_PX or before == (width, height):
            return width, height
    raise CalcResizeError(f"enlarging a {width} x {height} picture does not converge")


def fitted_patches(width: int, height: int) -> tuple[int, int]:
    """Patches (wide, high) of a picture of `width` x `height` pixels after fitting.

    Raises `ValueError` for an empty picture, `CalcResizeError` if fitting does not converge.
    """
    if width < 1 or height < 1:
        raise ValueError(f"a picture has at least one pixel a side, got {width} x {height}")
    aspect = width / height
    width, height = _enlarged(width, height)
    wide, high = math.ceil(width / PATCH_PX), math.ceil(height / PATCH_PX)
    if patch_tokens(wide, high) <= MAX_TOKENS:
        return wide, high
    # Rows r and columns a*r of tokens such that r * (a*r + 1) + 2 is about 1024.
    root = (-1 + math.sqrt(1 + 4 * aspect * (MAX_TOKENS - _MARK_TOKENS))) / (2 * aspect)
    rows, columns = math.floor(root), math.floor(aspect * root)
    if rows < 1:
        rows, columns = 1, MAX_TOKENS - _MARK_TOKENS - 1
    if columns < 1:
        columns, rows = 1, (MAX_TOKENS - _MARK_TOKENS) // 2
    scale = min(_TOKEN_PX * columns / width, _TOKEN_PX * rows / height)
    wide = max(1, math.floor(width * scale) // PATCH_PX)
    high = max(1, math.floor(height * scale) // PATCH_PX)
    return wide, high


def fitted_size(width: int, height: int) -> tuple[int, int]:
    """Size in pixels (width, height) that a picture is resized to."""
    wide, high = fitted_patches(width, height)
    return wide * PATCH_PX, high * PATCH_PX


def image_tokens(width: int, height: int) -> int:
    """Tokens of a picture of `width` x `height` pixels."""
    return patch_tokens(*fitted_patches(width, height))


def limited_size(width: int, height: int, max_side: int) -> tuple[int, int]:
    """Size whose longer side is at most `max_side`, of the same shape."""
    longer = max(width, height)
    if longer <= max_side:
        return width, height
    scale = max_side / longer
    return max(1, round(width * scale)), max(1, round(height * scale))
