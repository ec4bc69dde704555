"""Work grows with the answer: counted in characters that the states look at, not in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_recipe import Exchange
from deepinfer_recipe.parsing.call_parser import CallParser
from deepinfer_recipe.parsing.output_parser import OutputParser
from deepinfer_recipe.parsing.recovering_parser import RecoveringCallParser

MODEL = "DeepSeek-V4.1-Flash"
D = "｜DSML｜"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
        },
    }
]
CALL = f'\n\n<{D} calls>\n<{D} invoke name="f">\n'
STRING = f'{CALL}<{D} parameter name="cmd" string="true">'
OTHER = f'{CALL}<{D} parameter name="cmd" string="false">'
QUOTE = f"thinking\n\n<{D} calls>\n"
STATES = {
    OutputParser: (
        *("_leading_reasoning", "_reasoning", "_leading_content", "_content", "_finished"),
        *("_preamble", "_after_json", "_json", "_opening_tag", "_block"),
        *("_quoted", "_behind_quote"),
    ),
    CallParser: ("_block", "_name", "_arguments", "_header", "_value_text"),
    RecoveringCallParser: ("_between", "_value"),
}
TEXT = {"stop": ["END", "\n\n\nSTOP"], "tools": TOOLS}
JSON = {"response_format": {"type": "json_object"}, "stop": ["END"]}
# What the answer begins with, the chunk that is repeated, and what the request asks.
LOADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "thinking": ("r", "word ", TEXT),
    "thinking, newlines": ("r", "\n", TEXT),
    "thinking, beginnings of marks": ("r", f"<{D[:3]}", TEXT),
    "leading newlines of thinking": ("", "\n", TEXT),
    "leading newlines of the answer": ("r</think>", "\n", TEXT),
    "answer": ("r</think>a", "word ", TEXT),
    "answer, newlines": ("r</think>a", "\n", TEXT),
    "answer, newlines without stop": ("r</think>a", "\n", {"tools": TOOLS}),
    "answer, newlines without tools": ("r</think>a", "\n", {"stop": ["\n\nEND", "END"]}),
    "answer, beginnings of a stop sequence": ("r</think>a", "EN", TEXT),
    "answer, beginnings of marks": ("r</think>a", "<", TEXT),
    "answer, marks that open nothing": ("r</think>a", f"<{D}x", TEXT),
    "string value": (f"r</think>{STRING}", "word ", TEXT),
    "string value, newlines": (f"r</think>{STRING}", "\n", TEXT),
    "string value, beginnings of tags": (f"r</think>{STRING}", f"</{D} para", TEXT),
    "other value": (f"r</think>{OTHER}", "[1,", TEXT),
    "name of a parameter": (f'r</think>{CALL}<{D} parameter name="', "x", TEXT),
    "name of a call": (f'r</think>\n\n<{D} calls>\n<{D} invoke name="', "x", TEXT),
    "between tags": (f"r</think>{CALL}", "word ", TEXT),
    "between tags, blanks": (f"r</think>{CALL}", "\n", TEXT),
    "blanks in a tag": (f"r</think>{CALL}</{D} invoke", " ", TEXT),
    "block in thinking": (QUOTE, "word ", TEXT),
    "behind a block in thinking": (f"{QUOTE}</{D} calls>", "\n", TEXT),
    "json": ('r</think>{"a": "', "word ", JSON),
    "json, newlines": ('r</think>{"a": "', "\n", JSON),
    "around json": ("r</think>", "word ", JSON),
    "around json, newlines": ("r</think>x", "\n", JSON),
}
LARGE = ("answer, newlines", "string value")
PER_CHARACTER = 64
LONG_TAG = 4096
"""A tag may be this long before it is text; until then it is looked at again with every chunk."""


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    total = [0]

    def counting(real: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def state(self: Any, text: str) -> Any:
            total[0] += len(text)
            return real(self, text)

        return state

    for owner, names in STATES.items():
        for name in names:
            monkeypatch.setattr(owner, name, counting(getattr(owner, name)))
    return total


@pytest.mark.parametrize("profile", ["parity", "extended"])
@pytest.mark.parametrize("load", LOADS)
def test_work_grows_with_the_answer(load: str, profile: Any, looked_at: list[int]) -> None:
    head, chunk, asked = LOADS[load]
    work: list[int] = []
    for count in (10_000, 100_000) if load in LARGE else (2000, 20_000):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "json"}], **asked}
        answer = Exchange("chat", body, id="i", profile=profile).answer
        answer.text(head)
        looked_at[0] = 0
        for _ in range(count):
            answer.text(chunk)
        answer.finish()
        work.append(looked_at[0])
        assert looked_at[0] <= PER_CHARACTER * count * len(chunk) + LONG_TAG**2
    if work[0] > LONG_TAG**2:
        assert work[1] <= 15 * work[0]
