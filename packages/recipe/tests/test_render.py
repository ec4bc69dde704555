"""Rendering: the literal strings of the formats, custom spellings, training texts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_recipe import (
    AssistantMessage,
    Conversation,
    DeepseekV4Encoding,
    DeepseekV41Encoding,
    ModelVersion,
    SpecialTokens,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UrlImageSource,
    UserMessage,
    render_training,
)
from deepinfer_recipe.conversation.parsing_options import ParsingOptions, ThinkingInitialStage
from deepinfer_recipe.conversation.special_tokens import SpecialToken
from deepinfer_recipe.parsing.output_parser import OutputParser
from deepinfer_recipe.prompts.formats.prompt_format import PromptFormat, TemplatePiece
from deepinfer_recipe.prompts.formats.v4 import V4
from deepinfer_recipe.prompts.formats.v4_1 import V4_1

STRINGS = json.loads((Path(__file__).parent / "corpus/prompt_strings.json").read_text("utf-8"))
TOOL = ToolDefinition("f", "d", {"type": "object"})
EOS = SpecialToken.Eos.value


def spelled(pieces: tuple[TemplatePiece, ...]) -> str:
    return "".join(piece if isinstance(piece, str) else piece.value for piece in pieces)


@pytest.mark.parametrize(("form", "key"), [(V4, "v4"), (V4_1, "v41")])
def test_literal_strings_are_those_measured(form: PromptFormat, key: str) -> None:
    strings = STRINGS[key]
    efforts = strings.get("effort_after_bos") or strings["effort_after_system_token"]
    assert form.effort_texts == efforts
    head, tail = strings["tools_block"].split("{TOOLS}")
    assert (spelled(form.tools_block_head), spelled(form.tools_block_tail)) == (head, tail)
    assert form.json_object_block == strings["json_object_block"]
    assert form.json_schema_head + "{SCHEMA}" == strings["json_schema_block"]
    assert strings["tool_calls_open"] == f"<｜DSML｜{form.calls_tag}>"
    assert strings["invoke_close"] == f"</｜DSML｜{form.invoke_tag}>"


def test_special_tokens_have_the_measured_spellings() -> None:
    assert {token.name: token.default_str() for token in SpecialToken} == STRINGS["special_tokens"]


def test_custom_spelling_replaces_the_default_everywhere() -> None:
    tokens = SpecialTokens(dsml="@@", thinking_end="<<end>>", user="[U]")
    conversation = Conversation(
        [UserMessage("q"), AssistantMessage("", "r", [ToolCall("1", "f", "{}")])],
        tools=[TOOL],
    )
    prompt = DeepseekV41Encoding().with_special_tokens(tokens).render_conversation(conversation)
    assert "｜DSML｜" not in prompt.prompt
    assert "</think>" not in prompt.prompt
    assert {prompt.prompt[a:b] for a, b in prompt.special_ranges} >= {"@@", "<<end>>", "[U]"}


def test_typed_picture_token_is_not_a_placeholder() -> None:
    message = UserMessage("<｜image｜> and <｜image｜>", [UrlImageSource("https://e.org/a.png")])
    rendered = DeepseekV41Encoding().render_conversation(Conversation([message]))
    marks = [rendered.prompt[a:b] for a, b in rendered.special_ranges]
    assert marks.count("<｜image｜>") == 1
    assert len(rendered.image_sources) == 1


def test_v4_has_no_pictures() -> None:
    message = UserMessage("<｜image｜>", [UrlImageSource("https://e.org/a.png")])
    rendered = DeepseekV4Encoding().render_conversation(Conversation([message]))
    assert "[Unsupported Image]" in rendered.prompt
    assert rendered.image_sources == []


def test_results_are_put_into_the_order_of_their_calls() -> None:
    calls = [ToolCall("1", "f", "{}"), ToolCall("2", "f", "{}")]
    conversation = Conversation(
        [
            UserMessage("q"),
            AssistantMessage("", "", calls),
            ToolMessage("second", "2"),
            ToolMessage("first", "1"),
        ],
        tools=[TOOL],
    )
    prompt = DeepseekV41Encoding().render_conversation(conversation).prompt
    assert "<tool_result>first</tool_result>\n\n<tool_result>second</tool_result>" in prompt


@pytest.mark.parametrize(
    ("encoding", "order"), [(DeepseekV4Encoding, ["a", "b"]), (DeepseekV41Encoding, ["b", "a"])]
)
def test_v4_shows_calls_by_id_and_v4_1_as_they_were_made(encoding: type, order: list[str]) -> None:
    calls = [ToolCall("b", "tool_b", "{}"), ToolCall("a", "tool_a", "{}")]
    results = [ToolMessage("result of a", "a"), ToolMessage("result of b", "b")]
    conversation = Conversation(
        [UserMessage("q"), AssistantMessage("", "", calls), *results], tools=[TOOL]
    )
    prompt = encoding().render_conversation(conversation).prompt
    assert re.findall(r'name="tool_(\w)"', prompt) == order
    assert re.findall(r"result of (\w)", prompt) == order


@pytest.mark.parametrize("version", list(ModelVersion))
def test_training_prompt_is_the_prompt_of_inference(version: ModelVersion) -> None:
    messages = [
        SystemMessage("s"),
        UserMessage("q"),
        AssistantMessage("", "think", [ToolCall("1", "f", '{"a": 1}')]),
        ToolMessage("r", "1"),
    ]
    answer = AssistantMessage("done", "more")
    example = render_training(Conversation([*messages, answer], tools=[TOOL]), version)
    encoding = DeepseekV41Encoding() if version.name.endswith("Flash") else DeepseekV4Encoding()
    inference = encoding.render_conversation(Conversation(messages, tools=[TOOL]))
    assert example.prompt == inference.prompt
    assert example.completion == f"more</think>done{EOS}"
    targets = [example.text[a:b] for a, b in example.target_ranges]
    assert len(targets) == 2
    assert all(target.endswith(EOS) for target in targets)
    assert targets[-1] == example.completion


def test_training_text_must_end_with_an_answer() -> None:
    with pytest.raises(ValueError, match="must end with an assistant message, got a user message"):
        render_training(Conversation([UserMessage("q")]))


PLAIN = st.text(st.sampled_from('ab é\n<{}"\\'), min_size=1, max_size=12).map(str.strip)


@settings(max_examples=80, deadline=None)
@given(
    PLAIN,
    PLAIN,
    st.dictionaries(PLAIN, st.none() | st.integers() | PLAIN | st.lists(PLAIN), max_size=3),
    st.sampled_from(list(ModelVersion)),
)
def test_what_training_teaches_is_parsed_back(
    reasoning: str, content: str, arguments: dict[str, object], version: ModelVersion
) -> None:
    calls = [ToolCall("1", "f", json.dumps(arguments))]
    answer = AssistantMessage(content, reasoning, calls)
    example = render_training(Conversation([UserMessage("q"), answer], tools=[TOOL]), version)
    found: dict[str, str] = {"reasoning": "", "content": "", "arguments": ""}

    class Sink:
        def reasoning(self, text: str) -> None:
            found["reasoning"] += text

        def content(self, text: str) -> None:
            found["content"] += text

        def call_started(self, name: str) -> None:
            found["name"] = name

        def call_arguments(self, piece: str, raw: str | None = None) -> None:
            found["arguments"] += piece

        def call_ended(self, meant: str | None = None) -> None:
            found["ended"] = "yes"

    stage = ThinkingInitialStage.ReasoningStart
    parser = OutputParser(ParsingOptions(thinking_initial_stage=stage), Sink())
    parser.feed(example.completion.removesuffix(EOS))
    parser.finish(mends=False)
    assert (found["reasoning"], found["content"]) == (reasoning, content)
    keys = [key for key in arguments if '"' not in key and "\\" not in key]
    got = json.loads(found["arguments"])
    assert {key: got[key] for key in keys} == {key: arguments[key] for key in keys}
    assert found["ended"] == "yes"
