"""An OpenAI-style answer made by hand: recipe writes the prompt and reads the output, an HTTP
client asks a text completion server for the tokens in between.

python http_client.py [URL of a server with /v1/completions, such as http://127.0.0.1:8000]

Without a URL a stand-in answers.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
import urllib.request

from deepinfer_recipe import Exchange

BODY = {
    "model": "DeepSeek-V4.1-Flash",
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "thinking": {"type": "disabled"},
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                },
            },
        }
    ],
}
MODEL_SAYS = (
    'I look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


class StandIn(http.server.BaseHTTPRequestHandler):
    """Says what a model would."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        answer = json.dumps({"choices": [{"text": MODEL_SAYS, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def complete(url: str, model: str, prompt: str) -> tuple[str, str]:
    """Text and finish reason of a completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": 100, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        choice = json.load(response)["choices"][0]
    return choice["text"], choice["finish_reason"]


def main() -> None:
    url, model = (sys.argv[1], sys.argv[2]) if len(sys.argv) > 2 else ("", "stand-in")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = url or f"http://127.0.0.1:{server.server_port}"
    exchange = Exchange("chat", json.dumps(BODY), id="chatcmpl-1")
    print(exchange.prompt)
    text, reason = complete(url, model, exchange.prompt)
    answer = exchange.answer
    answer.ready(prompt_tokens=0, cached_tokens=0)
    answer.text(text, tokens=1)
    answer.finish("length" if reason == "length" else "stop")
    server.shutdown()
    message = exchange.response()["choices"][0]
    print(json.dumps(message, indent=1))
    if model == "stand-in":
        (call,) = message["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


if __name__ == "__main__":
    main()
