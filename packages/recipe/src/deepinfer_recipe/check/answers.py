"""Where answers come from: this library in-process, or a server over HTTP."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from deepinfer_recipe.base.errors import RecipeError
from deepinfer_recipe.protocols.table import PROTOCOLS
from deepinfer_recipe.serving.exchange import Exchange
from deepinfer_recipe.serving.wire_errors import ProtocolName, error_response

_MAX_ANSWER_BYTES = 16 * 2**20
_OUTPUT = "Two and two.</think>Four."
_CALL = (
    'I ask.</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">\n'
    '<｜DSML｜ parameter name="town" string="true">Oslo</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer: status, media type, body."""

    status: int
    media_type: str
    body: str


class OwnAnswers:
    """This library, with output as a model would write it."""

    name = "this library"

    def ask(self, protocol: ProtocolName, body: Any) -> Reply:
        """Answer one request."""
        raw = body if isinstance(body, str) else json.dumps(body)
        try:
            exchange = Exchange(protocol, raw, id="check-1", created=1)
        except RecipeError as error:
            status, payload = error_response(protocol, error)
            return Reply(status, "application/json", json.dumps(payload))
        answer = exchange.answers
        conversation = exchange.request.conversation
        text = _OUTPUT
        if conversation.has_tools and conversation.history[-1].role == "user":
            text = _CALL.format(name=conversation.tools[0].name)
        if not conversation.thinking_mode:
            text = text.partition("</think>")[2]
        frames: list[str] = []
        for one in answer:
            frames += one.ready(prompt_tokens=12, cached_tokens=4)
            for at in range(0, len(text), 3):
                frames += one.text(text[at : at + 3])
            frames += one.finish()
        if exchange.stream:
            return Reply(200, "text/event-stream", "".join(frames))
        return Reply(200, "application/json", json.dumps(exchange.response()))


class ServerAnswers:
    """A server that claims to speak the protocols."""

    def __init__(self, url: str, *, model: str | None, key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url wants http://host[:port] or https://host[:port], got {url!r}")
        self.name = url
        self._parts = parts
        self._model = model
        self._key = key
        self._timeout_s = timeout_s
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")

    def reach(self) -> None:
        """Connect once. Raises `OSError` saying that there is no server, before any case is run."""
        connection = self._connection()
        try:
            connection.connect()
        except OSError as error:
            raise OSError(f"no server at {self.name}: {error}") from None
        finally:
            connection.close()

    def ask(self, protocol: ProtocolName, body: Any) -> Reply:
        """Send one request. Raises `OSError` and `http.client.HTTPException`."""
        if isinstance(body, dict) and self._model is not None and body.get("model") != "no-such":
            body = {**body, "model": self._model}
        raw = (body if isinstance(body, str) else json.dumps(body)).encode()
        headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
        if protocol != "messages":
            del headers["anthropic-version"]
        if self._key:
            name = "x-api-key" if protocol == "messages" else "Authorization"
            headers[name] = self._key if protocol == "messages" else f"Bearer {self._key}"
        connection = self._connection()
        try:
            connection.request("POST", self._prefix + PROTOCOLS[protocol].path, raw, headers)
            response = connection.getresponse()
            data = response.read(_MAX_ANSWER_BYTES + 1)
        finally:
            connection.close()
        if len(data) > _MAX_ANSWER_BYTES:
            raise OSError(f"the answer is larger than {_MAX_ANSWER_BYTES} bytes")
        media_type = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
        return Reply(response.status, media_type, data.decode("utf-8", "surrogateescape"))

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(
            host, port, timeout=self._timeout_s, context=ssl.create_default_context()
        )
