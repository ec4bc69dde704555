"""Compiling in processes that can be killed: limits, memory of results, others going on."""

from __future__ import annotations

import json
import threading
import time

import pytest

from deepinfer_recipe import (
    GrammarBusy,
    GrammarError,
    GrammarService,
    GrammarTooComplex,
    GrammarUnavailable,
    GrammarVocabulary,
    ModelVersion,
    OutputConstraint,
    ParsingOptions,
    ThinkingInitialStage,
    compile_grammar,
    constraint_grammar,
)
from deepinfer_recipe.grammar.formats import json_schema
from deepinfer_recipe.grammar.service import _Compiler

pytest.importorskip("xgrammar", reason="the grammar extra is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

import grammar_support as support  # noqa: E402
import numpy as np  # noqa: E402

MODEL = "DeepSeek-V4.1-Flash"
TIMEOUT_S = 3.0
SICK = {
    "type": "object",
    "properties": {
        letter: {"type": "string", "pattern": f"({letter}{{1,3000}}z{{1,3000}}){{1,3000}}"}
        for letter in "abcdefghijkl"
    },
}
"""Each of these expressions takes a compiler seconds and much memory."""
SICK_TEXT = json.dumps(
    {"type": "structural_tag", "format": json_schema(SICK, excluded=(), max_whitespace=2)}
)
"""Written past the budget that refuses such expressions: the service must bear them too."""


def text(schema) -> str:
    return constraint_grammar(
        OutputConstraint("json", json.dumps(schema)),
        parsing_options=ParsingOptions(),
        version=ModelVersion.DeepseekV41Flash,
    )


def vocabulary() -> GrammarVocabulary:
    return support.vocabulary(MODEL)


@pytest.fixture(scope="module")
def service():
    one = GrammarService(vocabulary, timeout_s=TIMEOUT_S)
    one.compile(text({"type": "null"}))
    yield one
    one.close()


def test_what_comes_back_enforces(service):
    compiled = service.compile(text({"type": "boolean"}))
    ids = support.random_answer(compiled, MODEL, 1)
    assert support.tokenizer(MODEL).backend.decode(ids[:-1]) in ("true", "false")


def test_a_result_is_kept_and_shared(service):
    before = service.counters()
    first, again = (service.submit(text({"type": "integer"})) for _ in range(2))
    assert first.result() is again.result() is service.compile(text({"type": "integer"}))
    after = service.counters()
    assert after["grammar_compilations"] == before["grammar_compilations"] + 1


def test_a_pathological_schema_dies_in_time_alone_and_is_remembered(service):
    sick = service.submit(SICK_TEXT)
    assert service.compile(text({"enum": ["meanwhile"]})).nbytes > 0
    with pytest.raises(GrammarTooComplex, match="longer than 3 s"):
        sick.result()
    before = service.counters()
    with pytest.raises(GrammarTooComplex):
        service.compile(SICK_TEXT)
    assert service.counters()["grammar_compilations"] == before["grammar_compilations"]
    assert service.compile(text({"enum": ["afterwards"]})).nbytes > 0


def test_what_is_no_grammar_is_told_in_the_librarys_words(service):
    with pytest.raises(GrammarError, match="minimum greater than maximum"):
        service.compile(text({"type": "integer", "minimum": 2, "maximum": 1}))
    with pytest.raises(GrammarError, match="cannot be compiled"):
        service.compile("not JSON at all")
    assert service.counters()["grammar_failures"] >= 2


def test_memory_beyond_the_limit_ends_the_compiler_not_the_program():
    service = GrammarService(vocabulary, timeout_s=60, memory_bytes=32 << 20)
    large = {"type": "const_string", "value": "x" * (64 << 20)}
    try:
        with pytest.raises(GrammarTooComplex, match="memory"):
            service.compile(json.dumps({"type": "structural_tag", "format": large}))
        assert service.compile(text({"type": "null"})).nbytes > 0
    finally:
        service.close()


def test_a_killed_compiler_is_replaced(service):
    for compiler in list(service._compilers):
        compiler.kill()
    assert service.compile(text({"enum": ["new"]})).nbytes > 0


def test_the_memory_of_results_is_bounded(service):
    one = service.compile(text({"type": "object", "properties": {"q": {"type": "string"}}}))
    limit = one.nbytes * 3 // 2  # room for one of them, not for two
    service = GrammarService(vocabulary, cache_bytes=limit, processes=1)
    try:
        for n in range(5):
            service.compile(text({"type": "object", "properties": {f"p{n}": {"type": "string"}}}))
            assert service.gauges()["grammar_cache_bytes"] <= limit
        before = service.counters()["grammar_compilations"]
        service.compile(text({"type": "object", "properties": {"p4": {"type": "string"}}}))
        assert service.counters()["grammar_compilations"] == before
        service.compile(text({"type": "object", "properties": {"p0": {"type": "string"}}}))
        assert service.counters()["grammar_compilations"] == before + 1
    finally:
        service.close()


def test_too_many_are_refused_at_once():
    gate = threading.Event()

    def slow() -> GrammarVocabulary:
        gate.wait()
        return vocabulary()

    service = GrammarService(slow, max_waiting=2)
    try:
        waiting = [service.submit(text({"enum": [n]})) for n in range(2)]
        with pytest.raises(GrammarBusy, match="try again"):
            service.submit(text({"enum": [2]}))
        assert service.gauges()["grammar_queue"] == 2
        gate.set()
        for future in waiting:
            assert future.result().nbytes > 0
    finally:
        gate.set()
        service.close()
    with pytest.raises(GrammarBusy, match="closed"):
        service.submit(text({"enum": [3]}))


def test_a_text_that_nobody_wants_any_more_is_killed_and_not_remembered():
    service = GrammarService(vocabulary, timeout_s=600)  # one that remembers no refusal of it
    try:
        service.abandon("never heard of")
        service.compile(text({"enum": ["x"]}))  # the process is there
        hard = service.submit(SICK_TEXT)
        for _ in range(6000):
            if hard.done() or SICK_TEXT in service._working:
                break
            time.sleep(0.01)
        service.abandon(SICK_TEXT)
        with pytest.raises(GrammarBusy, match="nobody waited"):
            hard.result(60)
        assert service._cache.get(SICK_TEXT) is None
        assert not service._abandoned
        assert service.compile(text({"enum": ["x"]}))
    finally:
        service.close()


def test_a_compiler_that_was_closed_before_it_was_asked_has_no_answer():
    compiler = _Compiler()
    compiler.kill()
    assert compiler.ask({"grammar": 'root ::= "a"'}, 60.0) is None
    assert not compiler.timed_out


def test_closing_ends_what_compiles():
    service = GrammarService(vocabulary, timeout_s=60)
    service.compile(text({"type": "null"}))
    sick = service.submit(SICK_TEXT)
    processes = [compiler._process for compiler in service._compilers]
    service.close()
    with pytest.raises((GrammarBusy, GrammarTooComplex)):
        sick.result()
    assert all(process.poll() is not None for process in processes)


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GrammarUnavailable, match=r"./packages/recipe\[grammar\]"):
        GrammarService(vocabulary)


def test_a_compiler_without_work_is_ended_and_started_again():
    service = GrammarService(vocabulary, idle_s=0.01)
    try:
        for n in range(2):
            assert service.compile(text({"enum": [n]})).nbytes > 0
            for _ in range(6000):
                if not service._compilers:
                    break
                time.sleep(0.01)
            assert not service._compilers
    finally:
        service.close()


def test_a_walk_goes_back_over_everything_it_went():
    matcher = support.compiled_null(MODEL).matcher()
    ids = support.tokenizer(MODEL).encode("null")
    for token in ids:
        assert matcher.accept(token)
    assert matcher.completed
    assert not matcher.accept(ids[0])
    matcher.rollback(len(ids))
    assert matcher.accepted == 0
    with pytest.raises(ValueError, match="gone 0"):
        matcher.rollback(1)


def test_a_beginning_that_fits_no_answer_is_refused():
    with pytest.raises(GrammarError, match="beginning"):
        support.compiled_null(MODEL).matcher("nu-")
    assert (
        support.compiled_null(MODEL).matcher("nu").accept(support.tokenizer(MODEL).encode("ll")[0])
    )


@pytest.mark.parametrize("thinks", [False, True])
def test_thinking_ends_once_even_where_strings_cannot_be_filtered(thinks):
    options = ParsingOptions(
        thinking_initial_stage=ThinkingInitialStage.ReasoningStart if thinks else None
    )
    bounded = OutputConstraint("json", '{"type":"string","maxLength":20}')
    made = constraint_grammar(
        bounded, parsing_options=options, version=ModelVersion.DeepseekV41Flash
    )
    matcher = compile_grammar(made, vocabulary()).matcher()
    row = np.zeros(vocabulary().mask_words, dtype=np.int32)
    end = vocabulary().think_end_id

    def may_end() -> bool:
        assert matcher.fill(row)
        return support.allowed(row, end)

    if thinks:
        assert matcher.accept(support.tokenizer(MODEL).encode("hm")[0])
        assert may_end()
        assert matcher.accept(end)
        assert not may_end()
        matcher.rollback(1)
        assert may_end()
        assert matcher.accept(end)
    assert matcher.accept(support.tokenizer(MODEL).encode('"')[0])
    assert not may_end()
    assert support.allowed(row, support.tokenizer(MODEL).encode("x")[0])


def test_thinking_ends_where_it_has_to():
    made = constraint_grammar(
        OutputConstraint("json", '{"type":"boolean"}'),
        parsing_options=ParsingOptions(thinking_initial_stage=ThinkingInitialStage.ReasoningStart),
        version=ModelVersion.DeepseekV41Flash,
    )
    compiled, own = compile_grammar(made, vocabulary()), support.tokenizer(MODEL)
    matcher = compiled.matcher(think_tokens=3)
    row = np.zeros(vocabulary().mask_words, dtype=np.int32)
    end, word = vocabulary().think_end_id, own.encode("hm")[0]
    for _ in range(3):
        assert matcher.fill(row)
        assert support.allowed(row, word)
        assert matcher.accept(word)
    for _ in range(2):
        assert matcher.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        assert bits.nonzero()[0].tolist() == [end], "nothing but the end of thinking"
        matcher.rollback(1)
        assert matcher.fill(row)
        assert support.allowed(row, word), "and back again, where drafts are thrown away"
        assert matcher.accept(word)
    assert matcher.accept(end)
    assert matcher.fill(row)
    assert support.allowed(row, own.encode("true")[0])
    answer = compiled.matcher(think_tokens=0)
    assert answer.fill(row)
    assert not support.allowed(row, word)


def test_a_forced_call_follows_the_thinking_at_once():
    tool = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}

    def after_thinking(kind: str) -> list[bool]:
        made = constraint_grammar(
            OutputConstraint(kind, json.dumps([tool])),
            parsing_options=ParsingOptions(
                thinking_initial_stage=ThinkingInitialStage.ReasoningStart
            ),
            version=ModelVersion.DeepseekV41Flash,
        )
        matcher, own = compile_grammar(made, vocabulary()).matcher(), support.tokenizer(MODEL)
        row = np.zeros(vocabulary().mask_words, dtype=np.int32)
        assert matcher.accept(vocabulary().think_end_id)
        assert matcher.fill(row)
        return [support.allowed(row, own.encode(text)[0]) for text in ("hm", "\n\n")]

    assert after_thinking("tool_call_required") == [False, True]
    assert after_thinking("tool_call") == [True, True]
