"""The server behind an agent framework: pydantic-ai with a tool, over Chat Completions.

python agent.py [BASE URL] [MODEL]

Without arguments it starts `deepinfer serve` with the embedded model, which knows no tools and
tells a child's story instead of calling one. The framework declares strict
tools: those need the extra `grammar`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


def started() -> tuple[subprocess.Popen[bytes], str]:
    """A server of its own, when it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = "import sys; from deepinfer_engine.cli.main import main; main()"
    server = subprocess.Popen(
        [sys.executable, "-c", command, "serve", "--port", str(port), "--single-process"]
    )
    base, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{base}/health", timeout=2).close()
        except OSError:
            time.sleep(0.3)
        else:
            return server, base
    server.kill()
    raise TimeoutError("the server did not start")


def ask(base: str, model: str) -> None:
    """One run of the agent."""
    provider = OpenAIProvider(base_url=f"{base}/v1", api_key="none")
    settings = ModelSettings(max_tokens=60, temperature=0.0)
    agent = Agent(OpenAIChatModel(model, provider=provider), model_settings=settings)
    calls: list[str] = []

    @agent.tool_plain
    def animal(colour: str) -> str:
        """Name an animal of a colour."""
        calls.append(colour)
        return "a red fox"

    result = agent.run_sync("Tell me a story about an animal that is red.")
    print("tool calls:", calls)
    print("answer:", result.output)
    print("usage:", result.usage)
    assert result.output


def main() -> None:
    if len(sys.argv) > 2:
        ask(sys.argv[1], sys.argv[2])
        return
    server, base = started()
    try:
        ask(base, "deepinfer-demo")
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
