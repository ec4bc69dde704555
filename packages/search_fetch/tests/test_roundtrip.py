"""Markdown that is rendered and read again is the same Markdown: nothing it says is lost."""

from __future__ import annotations

from html import escape

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_search_fetch.extract import extract
from deepinfer_search_fetch.extract.present import to_html, to_text

WORDS = st.text(
    alphabet=st.characters(
        codec="utf-8", categories=["L", "N"], include_characters=".,;:!?'()#*_-+`|<&["
    ),
    min_size=1,
    max_size=12,
)
TEXT = st.lists(WORDS, min_size=1, max_size=6).map(lambda w: escape("x" + " ".join(w) + "y"))
INLINE = st.one_of(
    TEXT,
    st.tuples(
        st.sampled_from(["b", "i", "code"]),
        st.lists(st.from_regex(r"[a-z]{1,6}", fullmatch=True), min_size=1, max_size=3),
    ).map(lambda t: f"see <{t[0]}>{' '.join(t[1])}</{t[0]}> there"),
    st.from_regex(r"[a-z]{1,8}", fullmatch=True).map(
        lambda w: f'the <a href="/{w}">{w} page</a> too'
    ),
)
ITEMS = st.lists(INLINE, min_size=1, max_size=3)
BLOCK = st.one_of(
    INLINE.map(lambda t: f"<p>{t}</p>"),
    st.tuples(st.integers(1, 6), TEXT).map(lambda t: f"<h{t[0]}>{t[1]}</h{t[0]}>"),
    INLINE.map(lambda t: f"<blockquote><p>{t}</p></blockquote>"),
    ITEMS.map(
        lambda items: "<hr><ul>" + "".join(f"<li>{i}</li>" for i in items) + "</ul><p>xy</p>"
    ),
    ITEMS.map(
        lambda items: "<hr><ol>" + "".join(f"<li>{i}</li>" for i in items) + "</ol><p>xy</p>"
    ),
    TEXT.map(lambda t: f'<pre><code class="language-py">{t}\n  {t}</code></pre>'),
    st.lists(st.tuples(INLINE, INLINE), min_size=2, max_size=3).map(
        lambda rows: (
            "<table>" + "".join(f"<tr><td>{a}</td><td>{b}</td></tr>" for a, b in rows) + "</table>"
        )
    ),
)


def markdown(body: str) -> str:
    page = f"<!doctype html><html><head><meta charset=utf-8></head><body>{body}</body></html>"
    return extract(page.encode(), "https://a.example/", mode="full").content


@settings(max_examples=150, deadline=None)
@given(st.lists(BLOCK, min_size=1, max_size=5))
def test_markdown_is_a_fixed_point_of_rendering_and_reading(blocks: list[str]) -> None:
    first = markdown("".join(blocks))
    again = markdown(to_html(first))
    assert to_text(again).split() == to_text(first).split()
    assert again == first
