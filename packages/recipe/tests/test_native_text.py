"""The compiled joining, plain-text check and events give what their Python forms give."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_recipe import native
from deepinfer_recipe.conversation.special_tokens import Spelling
from deepinfer_recipe.parsing.partial_match import Patterns
from deepinfer_recipe.prompts import prompt_builder
from deepinfer_recipe.protocols.common.stream_event import StreamEvent, maker

compiled: Any = native.routines
needs_compiled = pytest.mark.skipif(compiled is None, reason=f"this is {native.STATE}")


class OtherText(str):
    """What a user might pass; not a special token, whatever it spells."""

    __slots__ = ()


PIECES = st.builds(
    lambda kind, text: kind(text),
    st.sampled_from([str, Spelling, OtherText]),
    st.text(st.sampled_from("aé这😀\0\ud800<")),
)


@needs_compiled
@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES), st.data())
def test_joining_any_pieces_gives_the_same_text_and_ranges(
    parts: list[str], data: st.DataObject
) -> None:
    places = st.integers(0, len(parts))
    spans = [tuple(sorted(pair)) for pair in data.draw(st.lists(st.tuples(places, places)))]
    assert compiled.join(parts, Spelling, spans) == prompt_builder._join(parts, spans)


@needs_compiled
def test_spans_outside_the_pieces_and_other_things_are_refused() -> None:
    for spans in ([(0, 3)], [(-1, 1)], [(2, 1)]):
        with pytest.raises(IndexError):
            compiled.join(["a", "b"], Spelling, spans)
    for arguments in ((["a", 1], Spelling, []), ("ab", Spelling, []), (["a"], Spelling, [3])):
        with pytest.raises((TypeError, SystemError)):
            compiled.join(*arguments)


TEXTS = st.text(st.sampled_from("<abé这\n"), max_size=60)
PATTERNS = st.lists(st.text(st.sampled_from("<abé这"), min_size=1, max_size=5), min_size=1)


def touches(text: str, patterns: list[str]) -> bool:
    """What plain text must not do, spelled out."""
    begins = any(text.endswith(p[:n]) for p in patterns for n in range(1, len(p)))
    return begins or text.endswith("\n") or any(pattern in text for pattern in patterns)


@settings(max_examples=500, deadline=None)
@given(TEXTS, PATTERNS)
def test_plain_text_is_what_touches_no_pattern(text: str, patterns: list[str]) -> None:
    known = Patterns(patterns)
    assert known.is_plain(text) == known._is_plain(text) == (not touches(text, patterns))
    if not known.has_first(text):
        assert not touches(text, patterns)


@settings(max_examples=300, deadline=None)
@given(TEXTS, PATTERNS)
def test_what_is_held_is_the_longest_beginning_of_a_pattern(text: str, patterns: list[str]) -> None:
    wanted = [n for p in patterns for n in range(1, len(p)) if text.endswith(p[:n])]
    assert Patterns(patterns).held(text) == max(wanted, default=0)


def test_a_very_long_stop_sequence_takes_neither_memory_nor_time() -> None:
    patterns = Patterns(["</think>", "ab" * 100_000])
    assert patterns.held("x" + "ab" * 1000) == 2000
    assert not patterns.is_plain("x" + "ab" * 1000)
    assert patterns.is_plain("ab" * 1000 + "x")


@needs_compiled
def test_patterns_that_are_none_are_refused() -> None:
    for patterns in (("",), ("a", 1), ["a"]):
        with pytest.raises(TypeError):
            compiled.is_plain("text", patterns)


class Marked:
    """Something whose life can be watched."""


def test_events_are_the_same_however_they_are_made() -> None:
    for text, json in (('a"\n', '{"x":"a\\"\\n"}'), (None, '{"x":')):
        for event in (
            StreamEvent("k", '{"x":', text, "}", [1]),
            maker(StreamEvent)("k", '{"x":', text, "}", [1]),
        ):
            assert (event.kind, event.text, event.data) == ("k", text, [1])
            assert event.to_json() == json
            assert repr(event) == f"StreamEvent({json})"


def test_an_event_lets_go_of_what_it_holds_also_in_a_cycle() -> None:
    data = Marked()
    watched = weakref.ref(data)
    event = maker(StreamEvent)("k", "h", "t", "", [data])
    event.data.append(event)
    del data, event
    gc.collect()
    assert watched() is None


@needs_compiled
def test_events_never_break_on_missing_or_odd_fields() -> None:
    empty = StreamEvent.__new__(StreamEvent)
    with pytest.raises(AttributeError):
        empty.to_json()
    with pytest.raises(AttributeError):
        _ = empty.kind
    with pytest.raises(TypeError):
        StreamEvent("k", "h", 3).to_json()  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        StreamEvent.of("k")
    event = StreamEvent("k", "h", "t")
    del event.text
    with pytest.raises(AttributeError):
        event.to_json()
