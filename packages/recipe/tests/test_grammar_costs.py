"""Which grammars are walked as they come and which are computed in advance; what loading costs."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from deepinfer_recipe import (
    GrammarVocabulary,
    ModelVersion,
    OutputConstraint,
    ParsingOptions,
    compile_grammar,
    constraint_grammar,
)
from deepinfer_recipe.grammar import worker
from deepinfer_recipe.grammar.costs import doubtful_parts
from deepinfer_recipe.grammar.formats import any_text, const, json_schema, optional, regex
from deepinfer_recipe.grammar.rewrite import FORMATS
from deepinfer_recipe.grammar.service import _Cache

MODEL = "DeepSeek-V4.1-Flash"
COUNTS_IN_COUNTS = {"type": "string", "pattern": "^(.{1,20}x){1,20}$"}


def alike(number):
    """Parts that begin alike: what masks made ahead cost grows with their number."""
    each = [{"type": "array", "items": {"type": "string"}, "minItems": n} for n in range(1, number)]
    return {"anyOf": each}


LOOK_ALIKE = alike(60)


def tool(value, name="f"):
    parameters = {"type": "object", "properties": {"x": value}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calls(*tools) -> str:
    return constraint_grammar(
        OutputConstraint("tool_call", json.dumps(tools)),
        parsing_options=ParsingOptions(),
        version=ModelVersion.DeepseekV41Flash,
    )


def tag(form) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


PLAIN = [
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"enum": [f"constant {n}" for n in range(500)]},
    {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 32},
    {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {}}},
    {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]},
    {"type": "string", "minLength": 2},
    *({"type": "string", "format": name} for name in FORMATS),
]


def test_what_agents_send_is_walked_as_it_comes():
    assert doubtful_parts(calls(*(tool(one, f"f{n}") for n, one in enumerate(PLAIN)))) == []


@pytest.mark.parametrize(
    "value",
    [
        COUNTS_IN_COUNTS,
        {"type": "object", "properties": {"inside": COUNTS_IN_COUNTS}},
        LOOK_ALIKE,
        {"type": "array", "items": LOOK_ALIKE},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(99)}},
        {"type": "array", "items": {}, "minItems": 5000},
        {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": False},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array"}}},
    ],
)
def test_what_may_be_dear_is_tried_out_first(value):
    found = doubtful_parts(tag(json_schema(value, excluded=(), max_whitespace=1)))
    assert len(found) == 1
    # Beside others that are not, and once though it occurs twice.
    assert doubtful_parts(tag({"type": "sequence", "elements": [
        const("x"), *(json_schema(value, excluded=(), max_whitespace=1) for _ in range(2))
    ]})) == found  # fmt: skip


def test_doubt_is_about_what_begins_alike():
    names = [tool({"type": "string"}, f"f{n}") for n in range(100)]
    assert doubtful_parts(calls(*names)) == []
    alike = tag({"type": "or", "elements": [any_text("<")] * 9})
    assert doubtful_parts(alike) == [tag_of(alike)]
    loose = tag({"type": "sequence", "elements": [optional(const("a"))] * 41})
    assert doubtful_parts(loose) == [tag_of(loose)]
    for form in (regex("(a|b)*"), {"type": "grammar", "grammar": 'root ::= "a"'}, {"type": "new"}):
        assert len(doubtful_parts(tag(form))) == 1
    assert doubtful_parts("no tag") == []


def tag_of(text):
    return json.dumps(json.loads(text), separators=(",", ":"))


# -- with the library ---------------------------------------------------------------------------

xgrammar = pytest.mark.usefixtures("_library")


@pytest.fixture
def _library():
    pytest.importorskip("xgrammar", reason="the grammar extra is not installed")


@pytest.fixture
def support(_library):
    import grammar_support

    return grammar_support


def test_masks_made_ahead_and_on_the_way_are_equal(support):
    text = calls(*(tool(one, f"f{n}") for n, one in enumerate(PLAIN)), tool(alike(9), "alike"))
    vocabulary = support.vocabulary(MODEL)
    ahead = compile_grammar(text, vocabulary, ahead=True)
    on_the_way = compile_grammar(text, vocabulary)
    before = on_the_way.nbytes
    assert before < ahead.nbytes / 4
    for seed in range(12):
        answer = support.random_answer(ahead, MODEL, seed)
        assert support.random_answer(on_the_way, MODEL, seed) == answer
    assert before < on_the_way.nbytes < ahead.nbytes


def test_the_worker_makes_masks_ahead_where_a_part_is_dear(support, monkeypatch):
    vocabulary = support.vocabulary(MODEL)
    made = []

    def compiling(text, _, *, ahead=False):
        made.append((text, ahead))

    monkeypatch.setattr("deepinfer_recipe.grammar.compile.compile_grammar", compiling)
    spent = iter([0.0, 0.2, 0.0, worker._MOST_CPU_S + 1])
    monkeypatch.setattr("time.process_time", lambda: next(spent))
    hard = calls(tool(COUNTS_IN_COUNTS))
    (part,) = doubtful_parts(hard)
    assert worker._tried_out(hard, vocabulary) is False
    assert made == [(part, True)]
    assert worker._tried_out(hard, vocabulary) is True
    assert made[1:] == [(part, True), (hard, True)]


def test_a_vocabulary_travels_as_bytes(support):
    own = support.vocabulary(MODEL)
    other = GrammarVocabulary.deserialize(own.serialize())
    assert (other.size, other.think_end, other.think_end_id) == (
        own.size,
        own.think_end,
        own.think_end_id,
    )
    assert list(other.info.decoded_vocab) == list(own.info.decoded_vocab)
    assert other.info.stop_token_ids == own.info.stop_token_ids
    assert other.info.special_token_ids == own.info.special_token_ids


@xgrammar
@pytest.mark.parametrize(
    ("function", "absent"),
    [("library", ["transformers"]), ("library_without_torch", ["transformers", "torch"])],
)
def test_the_library_comes_without_what_grammars_do_not_use(function, absent):
    program = (
        "import sys\n"
        f"from deepinfer_recipe.grammar.library import {function}\n"
        f"made = {function}()\n"
        "made.GrammarCompiler(made.TokenizerInfo(['a', 'b'])).compile_regex('a+')\n"
        f"assert not {{*{absent}}} & {{*sys.modules}}, 'imported, or a stand-in was left'\n"
        f"assert {function}() is made\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@xgrammar
def test_a_process_that_cannot_do_without_torch_starts_again_with_it(monkeypatch):
    started = []

    def fails():
        raise AttributeError("this release wants more of torch")

    monkeypatch.setattr("deepinfer_recipe.grammar.library.library_without_torch", fails)
    monkeypatch.setattr("os.execv", lambda path, argv: started.append(argv))
    monkeypatch.setattr("sys.argv", ["worker"])
    worker._load()
    assert started[0][-1] == worker._WITH_TORCH
    monkeypatch.setattr("sys.argv", started[0])
    worker._load()
    assert len(started) == 1


def test_grammars_that_grew_push_others_out():
    cache = _Cache(100)
    sizes = {name: SimpleNamespace(nbytes=40) for name in "ab"}
    for name, one in sizes.items():
        future: Future = Future()
        future.set_result(one)
        cache.put(name, future)
    assert cache.used_bytes == 82
    sizes["b"].nbytes = 70
    assert cache.get("b")
    assert cache.get("a") is None
    assert cache.used_bytes == 71
