"""Every keyword of JSON Schema: held or refused by name, and so it stands in the README.

Each verdict is proven by a compiled grammar that real values walk through, beside what a
validator says of them. `pytest --update-api` writes the README's table anew.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from keyword_cases import CASES, VOCABULARIES, Case

from deepinfer_recipe import (
    AssistantMessage,
    Conversation,
    GrammarError,
    GrammarVocabulary,
    ModelVersion,
    OutputConstraint,
    ParsingOptions,
    ToolCall,
    ToolDefinition,
    UserMessage,
    compile_grammar,
    constraint_grammar,
    render_training,
)
from deepinfer_recipe.grammar.compile import _pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
VERSION = ModelVersion.DeepseekV41Flash
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- keywords: written by tests/test_grammar_keywords.py -->", "<!-- /keywords -->"
DSML, THINK_END, EOS = "｜DSML｜", "</think>", "<eos>"
PLACES = ("answer", "argument")


@cache
def vocabulary() -> GrammarVocabulary:
    """A token for each byte, and the three that answers are built with."""
    pytest.importorskip("xgrammar", reason="the grammar extra is not installed")
    spellings = [bytes([byte]) for byte in range(256)]
    spellings += [DSML.encode(), THINK_END.encode(), b""]
    head = {
        "count": len(spellings),
        "vocab_size": len(spellings),
        "ends": [258],
        "think_end": THINK_END,
        "think_end_id": 257,
    }
    return GrammarVocabulary(_pack(head, spellings))


def grammar_of(case: Case, place: str) -> str:
    """The grammar of an answer by the case's schema, or of a call with an argument by it."""
    schema = case.schema
    if place == "argument":
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters(schema)}}
        constraint = OutputConstraint("tool_call_required", json.dumps([tool]))
    else:
        constraint = OutputConstraint("json", json.dumps(schema))
    return constraint_grammar(constraint, parsing_options=ParsingOptions(), version=VERSION)


def parameters(schema: Any) -> dict[str, Any]:
    """Parameters with one argument `v`; what references lead to stands at the root."""
    own = dict(schema)
    rooted = ("$defs", "definitions", "$schema", "$id")
    root = {key: own.pop(key) for key in rooted if key in own}
    return {"type": "object", "properties": {"v": own}, "required": ["v"], **root}


def spellings(value: Any, place: str) -> list[str]:
    """How an answer may write the value: JSON with blanks or without."""
    spaced = json.dumps(value, ensure_ascii=False)
    tight = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if place == "answer":
        return [spaced, tight]
    call = ToolCall("c", "f", json.dumps({"v": value}, ensure_ascii=False))
    conversation = Conversation(
        [UserMessage("go"), AssistantMessage("", tool_calls=[call])],
        tools=[ToolDefinition("f", None, {"type": "object"})],
        thinking_mode=False,
    )
    completion = render_training(conversation, version=VERSION).completion
    block = completion[completion.index(f"<{DSML}") : completion.rindex(f"</{DSML}")]
    block = f"\n\n{block}</{DSML} calls>"
    return [block, block.replace(spaced, tight)]


def walks(compiled: Any, text: str) -> bool:
    """Whether the text is a whole answer."""
    matcher = compiled.matcher()
    for number, piece in enumerate(text.split(DSML)):
        tokens = [*([256] if number else []), *piece.encode()]
        if not all(matcher.accept(token) for token in tokens):
            return False
    return matcher.completed


def outcome(case: Case, place: str) -> str:
    """What becomes of the keyword: held, refused, silent, or (a fault) ignored."""
    try:
        text = grammar_of(case, place)
    except GrammarError as error:
        return "refused" if f"`{case.keyword}`" in str(error) else f"refused without name: {error}"
    compiled = compile_grammar(text, vocabulary())
    for value in case.good:
        assert any(walks(compiled, one) for one in spellings(value, place)), (value, text)
    for value in case.bad:
        if any(walks(compiled, one) for one in spellings(value, place)):
            return f"ignored: {value!r} passes"
    return "held" if case.bad else "silent"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.keyword}-{case.verdict}")
def test_a_keyword_is_held_or_refused_by_its_name(case: Case, place: str) -> None:
    validator = jsonschema_rs.validator_for(case.schema, validate_formats=True)
    assert all(map(validator.is_valid, case.good))
    assert not any(map(validator.is_valid, case.bad))
    assert bool(case.bad) == (case.verdict != "silent")
    assert outcome(case, place) == case.verdict


def test_every_keyword_of_the_standard_has_a_case() -> None:
    listed = [name for names in VOCABULARIES.values() for name in names]
    assert len(set(listed)) == len(listed)
    assert {case.keyword for case in CASES} == set(listed)


def verdict_text(keyword: str) -> str:
    """What the table says of a keyword, from the cases that prove it."""
    cases = [case for case in CASES if case.keyword == keyword]
    parts: list[str] = []
    for case in sorted(cases, key=lambda case: not case.when):
        word = "says nothing of values" if case.verdict == "silent" else case.verdict
        part = f"{word} {case.when}".strip()
        if part not in parts:
            parts.append(part)
    if len(parts) > 1 and any(not case.when for case in cases):
        parts[-1] = f"otherwise {parts[-1]}"
    return ", ".join(parts)


def table() -> str:
    """The README's table: a row for the keywords of a vocabulary that fare alike."""
    lines = ["| keywords | vocabulary | what becomes of them |", "|---|---|---|"]
    for vocabulary_name, keywords in VOCABULARIES.items():
        rows: dict[str, list[str]] = {}
        for keyword in keywords:
            rows.setdefault(verdict_text(keyword), []).append(f"`{keyword}`")
        for text, names in rows.items():
            lines.append(f"| {', '.join(names)} | {vocabulary_name} | {text} |")
    return "\n".join(lines)


def test_the_readme_has_the_table_of_these_cases(request: pytest.FixtureRequest) -> None:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"README.md lacks {BEGIN} or {END}"
    expected = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if request.config.getoption("--update-api"):
        README.write_text(expected, encoding="utf-8")
    assert expected == text or request.config.getoption("--update-api"), (
        "the table of keywords changed: run pytest --update-api and read the diff"
    )
