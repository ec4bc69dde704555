"""Completions: prompts of text and ids, several answers, echo, stops, log probabilities."""

from __future__ import annotations

import json

import pytest
from server_fakes import Script

PATH = "/v1/completions"


def body_of(**fields):
    return {"model": "deepinfer-demo", "prompt": "Once", **fields}


@pytest.fixture
def model(codec):
    return codec.model_names[0]


def chunks(text: str) -> list[dict]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


def test_a_prompt_of_text_goes_on(request_json, say, model):
    reply = request_json(say(" upon a time"), "POST", PATH, json=body_of(model=model))
    assert reply.status_code == 200
    value = reply.json()
    assert value["object"] == "text_completion"
    assert value["id"].startswith("cmpl-")
    [choice] = value["choices"]
    assert choice == {
        "index": 0, "text": " upon a time", "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip
    usage = value["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_prompt_of_ids_is_taken_as_it_is(make_app, codec, say, model):
    import asyncio

    from httpx import ASGITransport, AsyncClient

    app, engine, _ = make_app(say("x"))
    ids = codec.tokenize("abc")

    async def go():
        async with AsyncClient(transport=ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(PATH, json=body_of(model=model, prompt=ids))

    assert asyncio.run(go()).status_code == 200
    assert list(engine.requests[0].token_ids) == ids


def test_each_prompt_has_n_answers_in_order(request_json, codec, model):
    def speak(request):
        # the answer tells which prompt it belongs to, and that seeds differ
        name = codec.detokenize(request.token_ids)[-1]
        return Script([codec.tokenize(f"{name}{request.sampling.seed % 10}")], "length")

    fields = {"prompt": ["p", "q"], "n": 2, "seed": 4, "max_tokens": 8}
    value = request_json(speak, "POST", PATH, json=body_of(model=model, **fields)).json()
    assert [(c["index"], c["text"]) for c in value["choices"]] == [
        (0, "p4"), (1, "p5"), (2, "q4"), (3, "q5"),
    ]  # fmt: skip
    # a prompt is counted once, however many answers it has
    alone = request_json(
        speak, "POST", PATH, json=body_of(model=model, prompt=["p", "q"], max_tokens=8)
    ).json()
    assert value["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert value["usage"]["completion_tokens"] == 8


def test_streams_of_several_answers_end_once_with_the_usage_of_all(request_json, say, model):
    fields = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    reply = request_json(say("abc", size=1), "POST", PATH, json=body_of(model=model, **fields))
    parts = chunks(reply.text)
    *parts, last = parts
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    texts = {0: "", 1: "", 2: ""}
    for part in parts:
        [choice] = part["choices"]
        texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {"abc"}
    assert sum(part["choices"][0]["finish_reason"] == "stop" for part in parts) == 3


def test_echo_repeats_the_prompt_before_the_answer(request_json, say, model):
    value = request_json(say(" b"), "POST", PATH, json=body_of(model=model, echo=True)).json()
    assert value["choices"][0]["text"] == "Once b"
    nothing = request_json(
        say(" b"), "POST", PATH, json=body_of(model=model, echo=True, max_tokens=0)
    ).json()
    assert nothing["choices"][0]["text"] == "Once"
    assert nothing["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one END two", "END", "one "),
        ("one EN two", "END", "one EN two"),
        ("ENENDx", ["END", "zz"], "EN"),
        ("ab" * 9 + "aba", "abac", "ab" * 9 + "aba"),
        ("über", "b", "ü"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_behind_a_stop_sequence_is_shown(
    request_json, say, model, size, text, stop, shown, stream
):
    body = body_of(model=model, stop=stop, stream=stream, max_tokens=100)
    reply = request_json(say(text, size=size), "POST", PATH, json=body)
    if stream:
        found = "".join(c["choices"][0]["text"] for c in chunks(reply.text))
    else:
        found = reply.json()["choices"][0]["text"]
    assert found == shown


def test_log_probabilities_stand_beside_their_tokens(request_json, codec, model):
    script = Script([codec.tokenize("abc")], "length", logprobs=True)
    body = body_of(model=model, logprobs=1, max_tokens=3)
    [choice] = request_json(script, "POST", PATH, json=body).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] == {"a": -0.5}
    assert logprobs["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", ["text", "ids"])
def test_an_echoed_prompt_has_its_log_probabilities(
    request_json, codec, model, given, stream, max_tokens
):
    text = "a\u00e9 \U0001f98a!"
    ids = codec.tokenize(text)
    script = Script([codec.tokenize("bc")], "length", logprobs=True)
    body = body_of(
        model=model, prompt=text if given == "text" else ids, max_tokens=max_tokens,
        logprobs=1, echo=True, stream=stream,
    )  # fmt: skip
    reply = request_json(script, "POST", PATH, json=body)
    shown, lists = "", {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in chunks(reply.text) if stream else [reply.json()]:
        [choice] = part["choices"]
        shown += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            lists[name] += values
    begins = given == "text"  # what a prompt of text begins with is not in the text
    assert shown == text + "bc"[:max_tokens]
    assert len({len(values) for values in lists.values()}) == 1
    assert len(lists["tokens"]) == begins + len(ids) + max_tokens
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    assert lists["token_logprobs"][1:] == [-2.0] * (begins + len(ids) - 1) + [-0.5] * max_tokens
    assert lists["text_offset"] == sorted(lists["text_offset"])
    for start, token in zip(lists["text_offset"][begins:], lists["tokens"][begins:], strict=True):
        assert token.startswith("bytes:") or shown.startswith(token, start)
    if max_tokens:
        assert lists["text_offset"][-1] == len(shown) - 1


def test_what_is_filled_in_has_no_log_probabilities_of_a_prompt(request_json, say, model):
    body = body_of(model=model, echo=True, logprobs=1, suffix="x")
    reply = request_json(say("x"), "POST", PATH, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "suffix"


def test_token_ids_come_back_when_asked_for(request_json, codec, say, model):
    body = body_of(model=model, return_token_ids=True)
    [choice] = request_json(say("ab", eos=False), "POST", PATH, json=body).json()["choices"]
    assert choice["token_ids"] == codec.tokenize("ab")
    assert choice["prompt_token_ids"][1:] == codec.tokenize("Once")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [10**6]),
        ("prompt", [-1]),
        ("prompt", None),
        ("prompt", ["a", 1]),
        ("prompt", "\ud800"),
        ("suffix", "end"),
        ("max_tokens", -1),
        ("temperature", 3),
        ("top_p", 0),
        ("n", 0),
        ("n", 1000),
        ("best_of", 3),
        ("logprobs", 21),
        ("stop", ["a"] * 17),
        ("stream", "yes"),
        ("seed", 2**64),
        ("top_k", -2),
    ],
)
def test_a_bad_field_is_named(request_json, say, model, field, value):
    data = json.dumps(body_of(model=model, **{field: value}))
    headers = {"content-type": "application/json"}
    reply = request_json(say("x"), "POST", PATH, content=data, headers=headers)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b'{"prompt": "a"}'])
def test_a_body_that_is_none_is_400(request_json, say, data):
    assert request_json(say("x"), "POST", PATH, content=data).status_code == 400


def test_an_unknown_model_is_404_and_unknown_fields_are_named(request_json, say, model):
    assert request_json(say("x"), "POST", PATH, json=body_of(model="gpt")).status_code == 404
    body = body_of(model=model, wizardry=1, top_k=3)
    reply = request_json(say("x"), "POST", PATH, json=body)
    assert reply.headers["warning"] == '299 deepinfer "ignored: wizardry"'


def test_what_does_not_fit_says_all_numbers(request_json, say, model):
    reply = request_json(say("x"), "POST", PATH, json=body_of(model=model, max_tokens=5000))
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert "4096" in reply.json()["error"]["message"]
    assert "5000" in reply.json()["error"]["message"]


def test_a_stop_sequence_has_a_longest_length(request_json, say, model):
    for stop in ("x" * 1001, ["END", "x" * 1001]):
        reply = request_json(say("x"), "POST", PATH, json=body_of(model=model, stop=stop))
        assert reply.status_code == 400
        assert "stop" in reply.json()["error"]["message"]
