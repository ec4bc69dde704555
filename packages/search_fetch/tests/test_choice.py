"""The parts of the choice of content: votes, layout totals, the ensemble, comments."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_search_fetch.extract import extract
from deepinfer_search_fetch.extract.candidates import votes
from deepinfer_search_fetch.extract.hints import HINT_INDEX, SEMANTIC, context_columns, far_hint
from deepinfer_search_fetch.extract.html import HtmlOptions, prepare
from deepinfer_search_fetch.extract.layout import lay_out
from deepinfer_search_fetch.extract.select import LEAVES, Model, decide
from deepinfer_search_fetch.extract.wording import ends_content, has_date, has_price, is_furniture
from deepinfer_search_fetch.models import PageType

FURNITURE = ("Privacy", "sign in", "Related", "read more", "Kommentare", "Getty Images", "cookie")
URL = "https://birds.example/guide/kestrel.html"


def test_a_text_counts_where_the_order_leads_to_it_and_only_once() -> None:
    runs = ["ten best owls of all", "menu", "ten best owls of all", "they hunt at night", "menu"]
    candidate = "Ten best owls of all. They hunt at night."
    assert votes([r.split() for r in runs], candidate) == [0.0, 0.0, 1.0, 1.0, 0.0]


def test_a_run_that_is_half_there_counts_by_its_word_sequences() -> None:
    runs = ["one two three four", "a b c d e x y z", "five six seven eight"]
    candidate = "one two three four a b c d e five six seven eight"
    assert votes([r.split() for r in runs], candidate) == [1.0, 0.4, 1.0]


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=7), max_size=12))
def test_a_candidate_that_is_the_whole_page_gets_every_long_run(runs: list[list[str]]) -> None:
    found = votes(runs, " ".join(w for r in runs for w in r))
    assert all(v == 1.0 for v, r in zip(found, runs, strict=True) if len(r) >= 4)
    assert all(0.0 <= v <= 1.0 for v in found)


@given(st.text(alphabet="abcnorstuy ", max_size=12), st.sampled_from(FURNITURE))
def test_furniture_is_known_in_either_case_and_amid_other_words(text: str, phrase: str) -> None:
    around = f"{text} {phrase} {text}"
    assert is_furniture(around)
    assert is_furniture(around.upper())
    assert is_furniture(text) == is_furniture(text.upper())


def test_what_only_starts_a_heading_does_not_end_content_in_its_middle() -> None:
    assert ends_content("share this page")
    assert ends_content("12 comments")
    assert not ends_content("why we share")
    assert not ends_content("commentators")


def test_a_price_and_a_date_need_their_digits() -> None:
    assert has_price("now 12 kr")
    assert not has_price("kr and €")
    assert has_date("on 5.6., maybe")
    assert has_date("three days ago")
    assert has_date("1 in 1999")
    assert not has_date("a long imago 123")


def test_a_hint_fades_with_every_box_below_and_stays_known() -> None:
    page = "<div class='xnav' id=a><section><p>one</p></section></div><p>two</p>"
    prepared = prepare(f"<html><body class=nav>{page}</body></html>", None, HtmlOptions())
    assert prepared is not None
    layout = lay_out(prepared.page.runs)
    columns = context_columns(layout)
    names = [box.tag for box in layout.boxes]
    assert names == ["body", "div", "section", "p", "p"]
    near = columns[:, 2 + len(SEMANTIC) + HINT_INDEX["nav"]]
    np.testing.assert_allclose(near, [0, 1, 0.6, 0.36, 0])
    np.testing.assert_array_equal(far_hint(columns, "nav"), [0, 1, 1, 1, 0])
    np.testing.assert_array_equal(columns[:, 2 + SEMANTIC["section"]], [0, 0, 1, 1, 0])


def _random_tree(rng: np.random.Generator) -> tuple[list, list, list, list, object]:
    """Arrays as `Model` holds them, and the same tree as nested tuples."""
    features, thresholds, ruled_out, values = [], [], [], []

    def grow(depth: int) -> object:
        if depth == 0 or (depth < 3 and rng.random() < 0.3):
            values.append(float(rng.normal()))
            return values[-1]
        place, first = len(features), len(values)
        features.append(int(rng.integers(5)))
        thresholds.append(float(np.float32(rng.normal())))
        ruled_out.append(0)
        left = grow(depth - 1)
        ruled_out[place] = sum(1 << leaf for leaf in range(first, len(values)))
        return (features[place], thresholds[place], left, grow(depth - 1))

    tree = grow(4)
    spare = LEAVES - 1 - len(features)
    return (
        features + [0] * spare,
        thresholds + [1e30] * spare,
        ruled_out + [0] * spare,
        values + [0.0] * (LEAVES - len(values)),
        tree,
    )


def _walk(tree: object, x: np.ndarray) -> float:
    while isinstance(tree, tuple):
        feature, threshold, left, right = tree
        tree = left if x[feature] <= threshold else right
    return float(tree)  # type: ignore[arg-type]


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_the_ensemble_by_bit_masks_is_the_ensemble_by_walking(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [_random_tree(rng) for _ in range(7)]
    empty = np.zeros(0)
    model = Model(
        feature=np.array([t[0] for t in trees]).T,
        threshold=np.array([t[1] for t in trees], dtype=np.float32).T,
        ruled_out=np.array([t[2] for t in trees], dtype=np.uint16).T,
        value=np.array([t[3] for t in trees]).ravel(),
        bias=0.25,
        classes=(),
        page_mean=empty,
        page_scale=empty,
        page_weights=empty,
        page_bias=empty,
    )
    rows = rng.normal(size=(40, 3)).astype(np.float32).astype(np.float64)
    odds = np.array([0.25, 0.75])
    expected = [0.25 + sum(_walk(t[4], np.concatenate([row, odds])) for t in trees) for row in rows]
    found = model.keep_probability(rows, odds)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.array(expected))), rtol=1e-12)


def test_comments_belong_to_the_content_of_forums_only_unless_asked_for() -> None:
    prose = "<p>The kestrel hovers above open fields and watches the grass for voles all day. " * 2
    remark = "<p>I saw one near the old mill yesterday and it stayed there for a full hour."
    body = (
        '<html><head><title>Kestrels</title><script type="application/ld+json">'
        '{"@type": "NewsArticle"}</script></head><body><article><h1>Kestrels</h1>'
        f"{prose * 4}</article><div id=comments class=comment-list>{remark * 3}</div></body></html>"
    ).encode()
    for comments, kept in (("auto", False), ("never", False), ("always", True)):
        record = extract(body, URL, options=HtmlOptions(comments=comments))
        assert ("the old mill" in record.content) is kept
        assert "hovers above open fields" in record.content


def test_on_pages_of_many_parts_a_part_that_is_less_likely_than_not_may_stay() -> None:
    types: tuple[PageType, ...] = (
        "article",
        "forum",
        "collection",
        "documentation",
        "listing",
        "product",
        "service",
    )

    def kept(page_type: str, odds: float) -> list[bool]:
        body = "<p>one two three four</p><p>five six seven eight</p>"
        prepared = prepare(f"<html><body>{body}</body></html>", None, HtmlOptions())
        assert prepared is not None
        model = Model(  # one tree: the first feature decides between two leaves
            feature=np.zeros((LEAVES - 1, 1), dtype=np.int64),
            threshold=np.array([[0.5]] + [[1e30]] * (LEAVES - 2), dtype=np.float32),
            ruled_out=np.array([[0b1]] + [[0]] * (LEAVES - 2), dtype=np.uint16),
            value=np.array([2.2] + [np.log(odds / (1 - odds))] * (LEAVES - 1)),
            bias=0.0,
            classes=types,
            page_mean=np.zeros(1),
            page_scale=np.ones(1),
            page_weights=np.zeros((len(types), 1)),
            page_bias=np.array([3.0 * (name == page_type) for name in types]),
        )
        words = [run.text.split() for run in prepared.page.runs]
        decide(model, prepared.page, words, np.array([[0.0], [1.0]]), np.zeros(1))
        return [run.kept for run in prepared.page.runs]

    # By the odds as they are, 0.9 and 0.35, the first part alone would have the best expected F1.
    for page_type in types[2:]:
        assert kept(page_type, 0.35) == [True, True]
        assert kept(page_type, 0.02) == [True, False]
    for page_type in types[:2]:
        assert kept(page_type, 0.35) == [True, False]


def test_the_choice_drops_comments_that_the_model_would_keep_unless_the_page_is_a_forum() -> None:
    def kept(forum_bias: float) -> list[bool]:
        body = "<p>one two three</p><div class=comments><p>four five six</p></div><p>seven</p>"
        prepared = prepare(f"<html><body>{body}</body></html>", None, HtmlOptions())
        assert prepared is not None
        model = Model(
            feature=np.zeros((LEAVES - 1, 1), dtype=np.int64),
            threshold=np.zeros((LEAVES - 1, 1), dtype=np.float32),
            ruled_out=np.zeros((LEAVES - 1, 1), dtype=np.uint16),
            value=np.zeros(LEAVES),
            bias=1.0,  # every run is likely content
            classes=("article", "forum"),
            page_mean=np.zeros(1),
            page_scale=np.ones(1),
            page_weights=np.zeros((2, 1)),
            page_bias=np.array([0.0, forum_bias]),
        )
        words = [run.text.split() for run in prepared.page.runs]
        decide(model, prepared.page, words, np.zeros((3, 1)), np.zeros(1))
        return [run.kept for run in prepared.page.runs]

    assert kept(-3.0) == [True, False, True]
    assert kept(3.0) == [True, True, True]
