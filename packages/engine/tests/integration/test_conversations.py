"""Conversations with a running server: both protocols, the prompt cache, streams side by side."""

from __future__ import annotations

import concurrent.futures
import json

import anthropic
import httpx
import openai
import pytest

BLOCK = 128


@pytest.fixture
def chat(shared):
    with openai.OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0) as client:
        yield client.chat.completions


@pytest.fixture
def claude(shared):
    with anthropic.Anthropic(base_url=shared.url, api_key="none", max_retries=0) as client:
        yield client.messages


def model_of(server) -> str:
    return server.get("/v1/models").json()["data"][0]["id"]


def prompt_ids(server, messages):
    return server.post("/tokenize", {"messages": messages}).json()["tokens"]


def shared_blocks(a, b) -> int:
    """Tokens in the whole blocks that two prompts have in common; the last token is always
    computed.
    """
    common = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        common += 1
    return min(common, len(b) - 1) // BLOCK * BLOCK


def test_the_second_turn_reuses_every_whole_block_of_the_first(shared, chat, system_prompt):
    messages = [
        {"role": "system", "content": "One. " + system_prompt},
        {"role": "user", "content": "Hello!"},
    ]
    model = model_of(shared)
    first = chat.create(model=model, messages=messages, temperature=0, max_tokens=24)
    assert first.usage.prompt_tokens == len(prompt_ids(shared, messages))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    follow = [
        *messages,
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "What is my name?"},
    ]
    expected = shared_blocks(prompt_ids(shared, messages), prompt_ids(shared, follow))
    assert expected >= 2 * BLOCK
    second = chat.create(model=model, messages=follow, temperature=0, max_tokens=24)
    assert second.usage.prompt_tokens_details.cached_tokens == expected
    assert second.usage.prompt_tokens == len(prompt_ids(shared, follow))


def test_messages_reports_the_same_hit_outside_input_tokens(shared, claude, system_prompt):
    ask = {
        "model": model_of(shared),
        "max_tokens": 24,
        "extra_body": {"temperature": 0},
        "system": "Two. " + system_prompt,
    }
    first = claude.create(**ask, messages=[{"role": "user", "content": "Hello!"}])
    assert first.usage.cache_read_input_tokens == 0
    second = claude.create(**ask, messages=[{"role": "user", "content": "Hello! Again."}])
    assert second.usage.cache_read_input_tokens >= 2 * BLOCK
    assert second.usage.cache_read_input_tokens % BLOCK == 0
    total = claude.count_tokens(
        model=ask["model"],
        system=ask["system"],
        messages=[{"role": "user", "content": "Hello! Again."}],
    ).input_tokens
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens == total


def test_a_hit_changes_nothing_in_the_answer(shared, chat, system_prompt):
    ask = {
        "model": model_of(shared),
        "temperature": 0,
        "max_tokens": 32,
        "messages": [
            {"role": "system", "content": "Three. " + system_prompt},
            {"role": "user", "content": "Tell me a story."},
        ],
    }
    cold, warm = chat.create(**ask), chat.create(**ask)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens > 0
    assert warm.choices[0].message == cold.choices[0].message


def test_another_user_never_hits_what_the_first_one_stored(shared, chat, system_prompt):
    ask = {
        "model": model_of(shared),
        "temperature": 0,
        "max_tokens": 4,
        "messages": [
            {"role": "system", "content": "Four. " + system_prompt},
            {"role": "user", "content": "Hi"},
        ],
    }
    hits = [
        chat.create(**ask, user=user).usage.prompt_tokens_details.cached_tokens
        for user in ("a", "a", "b")
    ]
    assert hits[0] == 0
    assert hits[1] > 0
    assert hits[2] == 0


def test_stream_and_whole_answer_are_the_same(shared, chat, claude):
    ask = {
        "model": model_of(shared),
        "temperature": 0,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": "What is 12 plus 7?"}],
    }
    whole = chat.create(**ask).choices[0].message
    content = thought = ""
    for chunk in chat.create(**ask, stream=True):
        content += chunk.choices[0].delta.content or ""
        thought += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert (content, thought) == (whole.content, whole.reasoning_content)
    # Newer clients have no parameter for it, but pass it on.
    ask["extra_body"] = {"temperature": ask.pop("temperature")}
    message = claude.create(**ask)
    with claude.stream(**ask) as stream:
        final = stream.get_final_message()
    assert [block.to_dict().get("text") for block in final.content] == [
        block.to_dict().get("text") for block in message.content
    ]


def test_a_seed_makes_sampling_repeatable(shared, chat):
    ask = {
        "model": model_of(shared),
        "temperature": 1.0,
        "max_tokens": 24,
        "seed": 5,
        "messages": [{"role": "user", "content": "Tell me a story."}],
    }
    texts = {json.dumps(chat.create(**ask).choices[0].message.to_dict()) for _ in range(2)}
    assert len(texts) == 1


def test_an_echoed_prompt_has_the_log_probabilities_of_its_tokens_when_generated(shared):
    """What evaluation harnesses score answers by: prompts of ids, nothing to generate."""
    prompt = [5 + i * 7 % 1400 for i in range(4200)]  # several messages of them
    fields = {
        "model": model_of(shared),
        "temperature": 0,
        "logprobs": 2,
        "skip_special_tokens": False,
    }

    def ask(prompts, **more):
        reply = shared.post("/v1/completions", {**fields, "prompt": prompts, **more})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"]

    [made] = ask([prompt], max_tokens=6, return_token_ids=True)
    answer, said = made["token_ids"], made["logprobs"]
    whole, short = ask([[*prompt, *answer], [5, 6]], max_tokens=0, echo=True)
    of_prompt = whole["logprobs"]
    assert {len(of_prompt[name]) for name in of_prompt} == {len(prompt) + len(answer)}
    assert of_prompt["token_logprobs"][0] is of_prompt["top_logprobs"][0] is None
    assert of_prompt["tokens"][len(prompt) :] == said["tokens"]
    assert of_prompt["token_logprobs"][len(prompt) :] == pytest.approx(
        said["token_logprobs"], abs=1e-3
    )
    for ours, theirs in zip(
        of_prompt["top_logprobs"][len(prompt) :], said["top_logprobs"], strict=True
    ):
        assert ours == pytest.approx(theirs, abs=1e-3)
    for start, token in zip(of_prompt["text_offset"], of_prompt["tokens"], strict=True):
        assert token.startswith("bytes:") or whole["text"].startswith(token, start)
    assert len(short["logprobs"]["tokens"]) == 2


def test_eight_streams_at_once_all_end_and_everything_is_free_again(shared, until):
    model = model_of(shared)

    def one(number: int) -> int:
        body = {
            "model": model,
            "stream": True,
            "max_tokens": 32,
            "seed": number,
            "messages": [{"role": "user", "content": f"Count to {number}."}],
        }
        with httpx.stream(
            "POST", shared.url + "/v1/chat/completions", json=body, timeout=120
        ) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return len(lines)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(count > 2 for count in pool.map(one, range(8)))
    until(lambda: shared.metric("deepinfer_worker_running") == 0)
    assert shared.metric("deepinfer_http_requests_in_flight") == 0


def test_a_client_that_leaves_frees_its_place(shared, until):
    before = shared.metric("deepinfer_aborts_total", cause="disconnect")
    total = shared.metric("deepinfer_worker_blocks_capacity")
    # Workers report once a second: what an earlier test held may still be in the last report.
    until(lambda: shared.metric("deepinfer_worker_blocks_free") == total)
    body = {
        "model": model_of(shared),
        "stream": True,
        "max_tokens": 4000,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Tell me a story."}],
    }
    with httpx.stream("POST", shared.url + "/v1/chat/completions", json=body, timeout=60) as reply:
        next(reply.iter_lines())
    until(lambda: shared.metric("deepinfer_aborts_total", cause="disconnect") == before + 1)
    until(lambda: shared.metric("deepinfer_worker_running") == 0)
    until(lambda: shared.metric("deepinfer_worker_blocks_free") == total)


def test_wrong_requests_are_refused_and_leave_no_trace(shared):
    model = model_of(shared)
    assert httpx.post(shared.url + "/v1/chat/completions", content=b"{").status_code == 400
    long = {"model": model, "messages": [{"role": "user", "content": "word " * 60_000}]}
    reply = shared.post("/v1/chat/completions", long)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (
        shared.post("/v1/messages", {**long, "max_tokens": 5}).json()["error"]["type"]
        == "invalid_request_error"
    )
    assert shared.metric("deepinfer_http_requests_in_flight") == 0
    assert shared.get("/health/ready").status_code == 200
