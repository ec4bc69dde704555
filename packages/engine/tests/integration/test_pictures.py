"""Pictures sent to running servers by the official clients, on a tiny random model with a tower."""

from __future__ import annotations

import base64
import io
import time
from pathlib import Path

import anthropic
import openai
import pytest
import torch
from PIL import Image
from server_fakes import byte_tokenizer_json
from tiny_checkpoint import TINY, write_tiny
from tokenizers import Tokenizer

from deepinfer_recipe import SpecialToken

IMAGE = SpecialToken.Image.value
STORY = "Look at this closely and tell me what it is. " * 4


def tokenizer() -> Tokenizer:
    """As many tokens as the model: it may say any of them."""
    made = Tokenizer.from_str(byte_tokenizer_json())
    made.add_tokens([f"w{i}" for i in range(TINY["vocab_size"] - made.get_vocab_size())])
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny(
        tmp_path_factory.mktemp("models") / "tiny-vision",
        vision=True,
        tokenizer=tokenizer(),
        image_token=IMAGE,
        max_position_embeddings=4096,
    )


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory, running_server):
    with running_server(
        "--model", str(folder), "--dtype", "float64", cache_dir=tmp_path_factory.mktemp("kv")
    ) as server:
        yield server


def data_url(colour: str) -> str:
    out = io.BytesIO()
    picture = Image.new("RGB", (256, 256), colour)
    picture.paste(Image.linear_gradient("L"), mask=Image.radial_gradient("L"))
    picture.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def conversation(url: str, story: str = STORY) -> list[dict]:
    parts = [
        {"type": "text", "text": story},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": story},
    ]
    return [{"role": "user", "content": parts}]


def ask(server, url: str, story: str = STORY):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        return client.chat.completions.create(
            model="tiny-vision",
            messages=conversation(url, story),
            temperature=0,
            max_tokens=4,
            logprobs=True,
            top_logprobs=5,
            extra_body={"thinking": {"type": "disabled"}, "ignore_eos": True},
        )


def logprobs(answer) -> list[tuple[str, float]]:
    first = answer.choices[0].logprobs.content[0]
    return [(entry.token, entry.logprob) for entry in first.top_logprobs]


def test_a_picture_reaches_the_tower_and_its_cache_is_its_own(server) -> None:
    red, blue, again = (ask(server, data_url(c)) for c in ("red", "blue", "red"))
    assert red.usage.prompt_tokens == blue.usage.prompt_tokens
    assert logprobs(red) != logprobs(blue)
    assert [token for token, _ in logprobs(again)] == [token for token, _ in logprobs(red)]
    assert [p for _, p in logprobs(again)] == pytest.approx([p for _, p in logprobs(red)])
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in (red, blue, again)]
    body = {"messages": conversation(data_url("red")), "thinking": {"type": "disabled"}}
    ids = server.post("/tokenize", body).json()["tokens"]
    assert len(ids) == red.usage.prompt_tokens
    picture = ids.index(tokenizer().token_to_id(IMAGE))
    assert cached == [0, picture // 128 * 128, (len(ids) - 1) // 128 * 128]


def pictures_encoded(server) -> list[str]:
    """By the encode workers, as they reported last."""
    name = 'deepinfer_worker_encode_pictures_total{role="encode"'
    lines = server.get("/metrics").text.splitlines()
    return [line.rpartition(" ")[2] for line in lines if line.startswith(name)]


def test_an_encode_worker_changes_no_answer(server, folder: Path, running_server) -> None:
    flags = ("--dtype", "float64", "--no-cache", "--encode-workers", "1")
    with running_server("--model", str(folder), *flags) as apart:
        whole, again = (ask(it, data_url("green")) for it in (server, apart))
        workers = apart.get("/health").json()["workers"]
        for _ in range(600):  # it reports every second
            if (encoded := pictures_encoded(apart)) == ["1.0"]:
                break
            time.sleep(0.1)
    assert again.choices[0].message.content == whole.choices[0].message.content
    assert [token for token, _ in logprobs(again)] == [token for token, _ in logprobs(whole)]
    # The other server may have the story's first blocks cached, and then sums differently.
    assert [p for _, p in logprobs(again)] == pytest.approx([p for _, p in logprobs(whole)])
    assert sorted(worker["role"] for worker in workers) == ["decode", "encode", "prefill"]
    assert encoded == ["1.0"]


def test_every_protocol_takes_the_same_picture(server) -> None:
    url = data_url("red")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        content = [
            {"type": "input_text", "text": "Here: "},
            {"type": "input_image", "image_url": url, "detail": "auto"},
        ]
        one = client.responses.create(
            model="tiny-vision",
            input=[{"role": "user", "content": content}],
            temperature=0,
            max_output_tokens=4,
        )
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        source = {"type": "base64", "media_type": "image/png", "data": url.split(",")[1]}
        content = [{"type": "text", "text": "Here: "}, {"type": "image", "source": source}]
        messages = [{"role": "user", "content": content}]
        counted = client.messages.count_tokens(model="tiny-vision", messages=messages)
        two = client.messages.create(model="tiny-vision", messages=messages, max_tokens=4)
        with client.messages.stream(model="tiny-vision", messages=messages, max_tokens=4) as stream:
            three = stream.get_final_message()
    assert counted.input_tokens > 40
    for usage in (two.usage, three.usage):
        cached = usage.cache_read_input_tokens or 0
        assert usage.input_tokens + cached == counted.input_tokens
    assert one.usage.input_tokens > 40


def test_what_cannot_be_is_refused_in_the_protocol(server) -> None:
    with pytest.raises(openai.BadRequestError, match="does not fetch pictures by URL") as refused:
        ask(server, "https://example.org/cat.png")
    assert refused.value.param == "messages[0]"
    with pytest.raises(openai.BadRequestError, match="cut short or damaged"):
        ask(server, "data:image/png;base64," + base64.b64encode(b"\x89PNG junk").decode())


def test_a_text_model_refuses_pictures(shared) -> None:
    body = {"model": "deepinfer-demo", "messages": conversation(data_url("red"))}
    answer = shared.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == ("messages[0]", "invalid_request_error")
    assert "takes no pictures" in error["message"]


def test_a_tower_can_be_left_out(folder: Path, running_server) -> None:
    with running_server("--model", str(folder), "--no-vision", "--single-process") as server:
        body = {"model": "tiny-vision", "messages": conversation(data_url("red")), "max_tokens": 2}
        assert "takes no pictures" in server.post("/v1/chat/completions", body).text
        body["messages"] = [{"role": "user", "content": "hello"}]
        assert server.post("/v1/chat/completions", body).status_code == 200
