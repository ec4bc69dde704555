"""Where pictures stand in a prompt, and that everybody counts their tokens alike."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.core.pictures import PictureRules, overlapping, place, text_only
from deepinfer_engine.errors import RequestError
from deepinfer_recipe import ImageSizeRule

RELEASED = PictureRules(7)
SIDES = st.integers(1, 8192) | st.integers(1, 700)


def upstream_size(width: int, height: int) -> tuple[int, int]:
    """The released engine's own rule: what it makes of a picture that it is given."""
    patch, cell, most, least = 14, 3, 1024, 295_936
    if width * height < least:
        factor = math.sqrt(least / (width * height))
        width, height = int(width * factor), int(height * factor)
    wide, high = math.ceil(width / patch) * patch, math.ceil(height / patch) * patch
    columns, rows = math.ceil(wide / patch / cell), math.ceil(high / patch / cell)
    if rows * (columns + 1) + 2 <= most:
        return wide, high
    aspect = height / width
    columns_wanted = math.sqrt((most - 2) / aspect + 0.25) - 0.5
    rows_wanted = columns_wanted * aspect
    if columns_wanted < 1:
        return patch * cell, (most - 2) // 2 * patch * cell
    if rows_wanted < 1:
        return (most - 3) * patch * cell, patch * cell
    scale = min(
        math.floor(columns_wanted) * patch * cell / width,
        math.floor(rows_wanted) * patch * cell / height,
    )
    return math.floor(width * scale / patch) * patch, math.floor(height * scale / patch) * patch


@settings(max_examples=1500, deadline=None)
@given(SIDES, SIDES)
def test_codec_and_engine_count_the_tokens_of_a_picture_alike(width: int, height: int) -> None:
    rule = ImageSizeRule()
    size = rule.fitted_size(width, height)
    assert RELEASED.tokens(*size) == rule.image_tokens(width, height) <= 1024


@settings(max_examples=1500, deadline=None)
@given(SIDES, SIDES)
def test_the_released_engine_leaves_prepared_pictures_as_they_are(width: int, height: int) -> None:
    size = ImageSizeRule().fitted_size(width, height)
    if max(width / height, height / width) <= 100:
        assert upstream_size(*size) == size


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((1, 1), 184),
        ((800, 600), 317),
        ((1920, 1080), 968),
        ((3000, 2000), 977),
        ((4000, 4000), 994),
    ],
)
def test_published_counts(size: tuple[int, int], tokens: int) -> None:
    assert RELEASED.tokens(*ImageSizeRule().fitted_size(*size)) == tokens


def test_a_span_has_a_newline_a_row_and_two_marks() -> None:
    assert PictureRules(7, 14, 3).tokens(42, 42) == 1 * (1 + 1) + 2
    assert PictureRules(7, 14, 3).tokens(56, 98) == 3 * (2 + 1) + 2
    assert PictureRules(7, 5, 1).tokens(10, 15) == 3 * (2 + 1) + 2


PROMPTS = st.lists(st.one_of(st.integers(8, 30), st.tuples(st.integers(1, 9), st.integers(1, 9))))


@settings(deadline=None)
@given(PROMPTS)
def test_pictures_stand_where_their_placeholders_stood(parts: list) -> None:
    sizes = [p for p in parts if isinstance(p, tuple)]
    images = [(14 * w, 14 * h, bytes(3 * 14 * w * 14 * h)) for w, h in sizes]
    ids = [7 if isinstance(p, tuple) else p for p in parts]
    token_ids, pictures = place(ids, images, RELEASED)
    RELEASED.check(pictures, token_ids)
    assert [(p.width, p.height) for p in pictures] == [i[:2] for i in images]
    spans = [range(p.start, p.end) for p in pictures]
    assert [i for i, t in enumerate(token_ids) if t == 7] == [i for span in spans for i in span]
    assert [t for t in token_ids if t != 7] == [t for t in ids if t != 7]


@settings(deadline=None)
@given(PROMPTS, st.integers(0, 60), st.integers(0, 60))
def test_no_token_of_a_picture_is_text_in_any_cut(parts: list, a: int, b: int) -> None:
    sizes = [p for p in parts if isinstance(p, tuple)]
    images = [(14 * w, 14 * h, bytes(3 * 14 * w * 14 * h)) for w, h in sizes]
    ids = [7 if isinstance(p, tuple) else p for p in parts]
    token_ids, pictures = place(ids, images, RELEASED)
    start, end = min(a, b, len(token_ids)), min(max(a, b), len(token_ids))
    cut = token_ids[start:end]
    assert text_only(cut, start, pictures) == tuple(-1 if t == 7 else t for t in cut)
    inside = {p for p in pictures if set(range(p.start, p.end)) & set(range(start, end))}
    assert set(overlapping(pictures, start, end)) == inside


def test_placeholders_and_pictures_must_match() -> None:
    image = (14, 14, bytes(588))
    for ids, images in [([7, 7], [image]), ([8], [image]), ([7], [])]:
        with pytest.raises(RequestError, match="one placeholder for each picture"):
            place(ids, images, RELEASED)
