"""Pictures of requests: three protocols to one span of the prompt, and what is refused by name."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from PIL import Image
from released_config import RELEASED
from server_fakes import EOS, FakeEngine, Script, byte_codec, byte_tokenizer_json

from deepinfer_engine.codec import pictures as recipe_pictures
from deepinfer_engine.codec.errors import BodyTooLarge
from deepinfer_engine.codec.pictures import PicturePolicy
from deepinfer_engine.codec.recipe_codec import RecipeCodec
from deepinfer_engine.core.pictures import picture_digest
from deepinfer_engine.errors import CheckpointError, EngineUnavailable
from deepinfer_engine.server.limits import ByteBudget
from deepinfer_recipe import SpecialToken

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
DONE = Script([[EOS]])
IMAGE = SpecialToken.Image.value


@pytest.fixture
def codec() -> RecipeCodec:
    return byte_codec(pictures=PicturePolicy(max_images=2))


def encoded(size: tuple[int, int] = (800, 600), kind: str = "PNG", colour: str = "red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, kind)
    return out.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def body_of(protocol: str, *urls: str, text: str = "What is it?") -> dict[str, Any]:
    """A request with pictures, each before the text."""
    if protocol == "chat":
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [*parts, {"type": "text", "text": text}]
        return {"model": "toy", "messages": [{"role": "user", "content": content}]}
    if protocol == "responses":
        parts = [{"type": "input_image", "image_url": url} for url in urls]
        content = [*parts, {"type": "input_text", "text": text}]
        return {"model": "toy", "input": [{"role": "user", "content": content}]}
    blocks = []
    for url in urls:
        source = {"type": "url", "url": url}
        if url.startswith("data:"):
            head, data = url.split(",", 1)
            source = {"type": "base64", "media_type": head[5:].split(";")[0], "data": data}
        blocks.append({"type": "image", "source": source})
    content = [*blocks, {"type": "text", "text": text}]
    return {
        "model": "toy",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": content}],
    }


@pytest.fixture
def send(make_app):
    """(answer, what the engine was asked)"""

    def go(path: str, body: Any, script: Script = DONE, **settings: Any):
        async def once() -> tuple[httpx.Response, FakeEngine]:
            app, engine, _ = make_app(script, **settings)
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                answer = await client.post(path, json=body)
            assert app.state.services.pixels.held == 0
            return answer, engine

        answer, engine = asyncio.run(once())
        return answer, engine.requests

    return go


def refusal(answer: httpx.Response, protocol: str) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    if protocol == "messages":
        assert error["type"] == "invalid_request_error"
    return answer.status_code, error["message"], error.get("param")


@pytest.mark.parametrize("protocol", PATHS)
def test_a_data_url_becomes_a_span_of_image_tokens_with_its_pixels(send, codec, protocol) -> None:
    answer, (asked,) = send(PATHS[protocol], body_of(protocol, data_url(encoded())))
    assert answer.status_code == 200, answer.text
    (picture,) = asked.pictures
    assert (picture.width, picture.height, picture.length) == (812, 602, 317)
    assert picture.pixels == bytes([255, 0, 0]) * (812 * 602)
    assert picture.digest == picture_digest(812, 602, picture.pixels)
    (image,) = codec.tokenize(IMAGE)
    where = [i for i, token in enumerate(asked.token_ids) if token == image]
    assert where == list(range(picture.start, picture.end))
    usage = answer.json()["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(asked.token_ids)


def test_pictures_keep_their_order_and_equal_ones_their_digest(send) -> None:
    red, blue = (data_url(encoded(colour=c)) for c in ("red", "blue"))
    _, (asked,) = send(PATHS["chat"], body_of("chat", red, blue))
    assert [p.pixels[:3] for p in asked.pictures] == [b"\xff\0\0", b"\0\0\xff"]
    _, (again,) = send(PATHS["messages"], body_of("messages", blue))
    assert again.pictures[0].digest == asked.pictures[1].digest != asked.pictures[0].digest


def test_a_typed_image_token_is_no_picture(send, codec) -> None:
    body = body_of("chat", data_url(encoded()), text=f"{IMAGE} is a token")
    _, (asked,) = send(PATHS["chat"], body)
    (image,) = codec.tokenize(IMAGE)
    assert asked.token_ids.count(image) == asked.pictures[0].length


def test_counting_and_tokenising_see_the_span(send, codec) -> None:
    body = body_of("messages", data_url(encoded()))
    counted, _ = send("/v1/messages/count_tokens", body)
    bare, _ = send("/v1/messages/count_tokens", body_of("messages"))
    assert counted.json()["input_tokens"] >= bare.json()["input_tokens"] + 317
    ids, _ = send("/tokenize", {"messages": body_of("chat", data_url(encoded()))["messages"]})
    (image,) = codec.tokenize(IMAGE)
    assert ids.json()["tokens"].count(image) == 317


@pytest.mark.parametrize("protocol", PATHS)
def test_bad_pictures_are_refused_by_place(send, protocol) -> None:
    good = data_url(encoded())
    cut = data_url(encoded()[:200])
    other = data_url(b"BM not a picture")
    deep = data_url(encoded((9000, 10)))
    url = "https://example.org/cat.png"
    for bad, words in [
        (cut, "cannot be decoded"),
        (other, "not a WebP, PNG, JPEG or GIF"),
        (deep, "8192 pixels"),
        (url, "does not fetch pictures by URL"),
    ]:
        answer, asked = send(PATHS[protocol], body_of(protocol, good, bad))
        status, message, param = refusal(answer, protocol)
        assert (status, asked) == (400, [])
        assert words in message
        # Messages has no field for the place: its message says it.
        place = {"chat": "messages[0]", "responses": "input[0]"}.get(protocol, "")
        assert (param or "").startswith(place)
        assert (place or "messages.0.content[1]") in message
    many, asked = send(PATHS[protocol], body_of(protocol, good, good, good))
    status, message, _ = refusal(many, protocol)
    assert (status, asked) == (400, [])
    assert message.endswith("a request may hold 2 pictures on this server, this one has 3")


@pytest.mark.parametrize("protocol", PATHS)
def test_a_text_model_refuses_pictures_by_place(send, protocol, monkeypatch, codec) -> None:
    monkeypatch.setattr(codec, "_pictures", None)
    answer, asked = send(PATHS[protocol], body_of(protocol, data_url(encoded())))
    status, message, param = refusal(answer, protocol)
    assert (status, asked) == (400, [])
    assert "takes no pictures" in message
    assert param or "messages.0.content[0]" in message


def test_a_prompt_grown_too_long_by_pictures_is_told_with_numbers(send) -> None:
    big = data_url(encoded((4000, 4000)))
    engine_length = 4096
    body = body_of("chat", big, big, text="x" * 2500)
    answer, asked = send(PATHS["chat"], body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert str(engine_length) in answer.text
    assert asked == []


def test_pixels_of_requests_in_flight_are_bounded(send) -> None:
    answer, asked = send(
        PATHS["chat"], body_of("chat", data_url(encoded())), max_pixel_bytes=1 << 20
    )
    assert (answer.status_code, asked) == (413, [])
    budget = ByteBudget(10, "things")
    with (
        budget.holding(None, 6),
        pytest.raises(EngineUnavailable, match="6 of 10"),
        budget.holding(None, 5),
    ):
        pass
    with pytest.raises(BodyTooLarge), budget.holding(None, 11):
        pass
    with budget.holding(None, 10):
        assert budget.held == 10
    assert budget.held == 0


class _Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = encoded()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/cat.png"
    server.shutdown()
    server.server_close()
    thread.join()


def test_urls_are_fetched_when_allowed_and_never_from_this_machine(
    make_app, site, monkeypatch
) -> None:
    codec = byte_codec(pictures=PicturePolicy(fetches_urls=True))
    body = json.dumps(body_of("chat", site)).encode()
    with pytest.raises(recipe_pictures.InvalidRequest, match="be connected to") as refused:
        codec.prepare("chat", body, 4096)
    assert refused.value.param == "messages[0]"
    real = recipe_pictures.ImageFetcher

    def lenient(**options: Any) -> Any:
        assert 0 < options["timeout_s"] <= recipe_pictures.FETCH_S
        return real(destination_filter=lambda host, address: True, allows_any_port=True, **options)

    monkeypatch.setattr(recipe_pictures, "ImageFetcher", lenient)
    prepared = codec.prepare("chat", body, 4096)
    assert [p.length for p in prepared.pictures] == [317]


def test_a_request_has_one_deadline_for_all_its_urls(monkeypatch, site) -> None:
    now = [100.0]
    monkeypatch.setattr(recipe_pictures.time, "monotonic", lambda: now[0])
    fetcher = recipe_pictures._Fetcher(5)
    now[0] += 5
    with pytest.raises(recipe_pictures.ImageError, match="took over"):
        fetcher.fetch(site)


def test_a_tokenizer_of_another_model_is_refused(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    RecipeCodec.from_directory(tmp_path, ["toy"], pictures=PicturePolicy())
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    with pytest.raises(CheckpointError, match="image_token_id 129264: they do not belong"):
        RecipeCodec.from_directory(tmp_path, ["toy"], pictures=PicturePolicy())
    RecipeCodec.from_directory(tmp_path, ["toy"])
