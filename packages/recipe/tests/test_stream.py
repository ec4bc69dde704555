"""The stream processor: order of chunks, token ids, log probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from deepinfer_recipe import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ConversionOptions,
    InferenceChunk,
    InferenceFinishReason,
    MessagesChunkGenerator,
    ParsingOptions,
    PromptUsage,
    ResponsesRequest,
    ResponsesResponse,
    SpecialToken,
    StreamError,
    StreamProcessor,
    ThinkingInitialStage,
    Tokenizer,
)

BODY = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token.value, special=True) for token in SpecialToken])
    return Tokenizer(backend)


def processor(tokenizer: Tokenizer | None = None) -> StreamProcessor[Any]:
    request = ChatCompletionRequest(BODY).convert(ConversionOptions())
    generator = ChatCompletionRequest.chunk_generator(request, "id", "m", created=1)
    return StreamProcessor(generator, request.parsing_options, tokenizer)


def complete(events: list[Any], response: Any = None) -> dict[str, Any]:
    response = response or ChatCompletionResponse("id", "m", 1, 0, 0)
    for event in events:
        response.accumulate(event)
    return json.loads(response.to_json())


def test_pushing_after_the_end_is_misuse() -> None:
    stream = processor()
    stream.push(InferenceChunk.finish(InferenceFinishReason.Stop))
    assert stream.finished
    assert stream.finish() == []
    with pytest.raises(StreamError, match="finished"):
        stream.push(InferenceChunk.text("x", 1))


def test_closed_processor_neither_takes_nor_finishes() -> None:
    stream = processor()
    stream.close()
    assert not stream.finished
    for call in (stream.finish, lambda: stream.push(InferenceChunk.text("x", 1))):
        with pytest.raises(RuntimeError):
            call()


def test_generator_belongs_to_one_processor() -> None:
    generator = MessagesChunkGenerator("id", "m", False)
    StreamProcessor(generator, ParsingOptions())
    with pytest.raises(StreamError, match="already belongs"):
        StreamProcessor(generator, ParsingOptions())
    with pytest.raises(StreamError):
        generator.with_signature("s")


def test_second_ready_changes_nothing() -> None:
    stream = processor()
    events = stream.push(
        InferenceChunk.ready(prompt_usage=PromptUsage(prompt_tokens=7, prompt_cache_hit_tokens=3))
    )
    assert len(events) == 1
    assert stream.push(InferenceChunk.ready(prompt_usage=PromptUsage(prompt_tokens=99))) == []
    events += stream.push(InferenceChunk.text("</think>a", 2)) + stream.finish()
    usage = complete(events)["usage"]
    assert (usage["prompt_tokens"], usage["prompt_cache_miss_tokens"]) == (7, 4)


def test_given_signature_closes_the_thinking_block() -> None:
    generator = MessagesChunkGenerator("id", "m", True).with_signature("sealed")
    options = ParsingOptions(thinking_initial_stage=ThinkingInitialStage.ReasoningStart)
    stream = StreamProcessor(generator, options)
    events = stream.push(InferenceChunk.text("hm</think>", 1)) + stream.finish()
    signatures = [event.to_json() for event in events if "signature_delta" in event.to_json()]
    assert len(signatures) == 1
    assert "sealed" in signatures[0]


def test_token_chunk_without_tokenizer_closes_the_processor() -> None:
    stream = processor()
    with pytest.raises(StreamError, match="need a tokenizer"):
        stream.push(InferenceChunk.tokens([1]))
    with pytest.raises(StreamError):
        stream.finish()


@pytest.mark.parametrize(
    "chunk", [InferenceChunk.tokens([1, 2], [(-1.0, [])]), InferenceChunk.tokens([10**6])]
)
def test_undecodable_token_chunk_closes_the_processor(
    tokenizer: Tokenizer, chunk: InferenceChunk
) -> None:
    stream = processor(tokenizer)
    with pytest.raises(StreamError):
        stream.push(chunk)
    assert not stream.finished


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_characters_wait_until_their_bytes_are_whole(tokenizer: Tokenizer, size: int) -> None:
    text = "hmé</think>\n\nà 😀!"
    ids = tokenizer.encode(text)
    stream = processor(tokenizer)
    events: list[Any] = []
    for start in range(0, len(ids), size):
        events += stream.push(InferenceChunk.tokens(ids[start : start + size]))
    events += stream.finish()
    done = complete(events)
    message = done["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmé", "à 😀!")
    assert done["usage"]["completion_tokens"] == len(ids)
    assert done["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("hmé".encode())}


def test_half_a_character_at_the_end_becomes_a_replacement_sign(tokenizer: Tokenizer) -> None:
    stream = processor(tokenizer)
    ids = tokenizer.encode("</think>é")
    events = stream.push(InferenceChunk.tokens(ids[:-1])) + stream.finish()
    assert complete(events)["choices"][0]["message"]["content"] == "\ufffd"


def with_logprobs(tokenizer: Tokenizer, text: str) -> InferenceChunk:
    ids = tokenizer.encode(text)
    return InferenceChunk.tokens(ids, [(-0.5, [(token, -0.5)]) for token in ids])


def test_logprobs_are_those_of_the_tokens_shown(tokenizer: Tokenizer) -> None:
    stream = processor(tokenizer)
    events = stream.push(with_logprobs(tokenizer, "hm</think>\n\né!")) + stream.finish()
    logprobs = complete(events)["choices"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs["reasoning_content"]] == ["h", "m"]
    assert [entry["token"] for entry in logprobs["content"]] == ["\\xc3", "\\xa9", "!"]
    assert logprobs["content"][0]["bytes"] == [0xC3]
    assert logprobs["content"][2]["top_logprobs"] == [
        {"token": "!", "logprob": -0.5, "bytes": [33]}
    ]


def test_logprobs_stand_on_the_text_of_a_responses_message(tokenizer: Tokenizer) -> None:
    request = ResponsesRequest({"model": BODY["model"], "input": "x"}).convert(ConversionOptions())
    generator = ResponsesRequest.chunk_generator(request, "id", "m", created=1)
    stream: StreamProcessor[Any] = StreamProcessor(generator, request.parsing_options, tokenizer)
    events = stream.push(with_logprobs(tokenizer, "</think>ok")) + stream.finish()
    done = complete(events, ResponsesResponse("id", "m", 1, 0, 0))
    part = done["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["o", "k"]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_behind_a_stop_sequence_are_not_counted(tokenizer: Tokenizer, size: int) -> None:
    request = ChatCompletionRequest({**BODY, "stop": "END", "reasoning_effort": "none"})
    converted = request.convert(ConversionOptions())
    generator = ChatCompletionRequest.chunk_generator(converted, "id", "m", created=1)
    stream: StreamProcessor[Any] = StreamProcessor(generator, converted.parsing_options, tokenizer)
    ids = tokenizer.encode("okENDmore")
    events: list[Any] = []
    for start in range(0, len(ids), size):
        if not stream.finished:
            events += stream.push(InferenceChunk.tokens(ids[start : start + size]))
    done = complete(events)
    assert done["usage"]["completion_tokens"] == len("okEND")
    assert done["choices"][0]["message"]["content"] == "ok"


def test_tool_arguments_have_log_probabilities_where_the_deployment_wants_them(
    tokenizer: Tokenizer,
) -> None:
    text = (
        'a</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
        '<｜DSML｜ parameter name="x" string="true">yé"</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="n" string="false">[1, 2]</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    tool = {"type": "function", "function": {"name": "f"}}
    body = {**BODY, "tools": [tool], "logprobs": True}
    for wanted in (False, True):
        options = ConversionOptions().with_tool_call_logprobs(wanted)
        converted = ChatCompletionRequest(body, profile="extended").convert(options)
        generator = ChatCompletionRequest.chunk_generator(converted, "id", "m", created=1)
        stream: StreamProcessor[Any] = StreamProcessor(
            generator, converted.parsing_options, tokenizer
        )
        events: list[Any] = []
        for token in tokenizer.encode(text):
            pair = [(-0.5, [(token, -0.5)])]
            events += stream.push(InferenceChunk.tokens([token], pair))
        choice = complete(events + stream.finish())["choices"][0]
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"x": 'yé"', "n": [1, 2]}
        if not wanted:
            assert "tool_calls" not in choice["logprobs"]
            continue
        [told] = choice["logprobs"]["tool_calls"]
        spelled = b"".join(bytes(entry["bytes"]) for entry in told["arguments"])
        assert told["index"] == 0
        assert spelled.decode() == 'yé"[1, 2]'
