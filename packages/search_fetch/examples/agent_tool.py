"""Search and Fetch as an agent's tools: the same page by REST and by MCP, from one service.

python agent_tool.py

It starts a site of one page and a service on loopback. Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

PAGE = "<title>Owls</title><h1>Owls</h1><p>" + "An owl hears a vole under the snow. " * 8


class Site(http.server.BaseHTTPRequestHandler):
    """One page."""

    def do_GET(self) -> None:
        body = PAGE.encode() if self.path == "/owl" else b""
        self.send_response(200 if body else 404)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(url: str) -> None:
    """Until a service answers, a minute at most."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(url)


def by_rest(service: str, url: str) -> str:
    request = urllib.request.Request(
        f"{service}/v1/fetch",
        json.dumps({"url": url}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["content"]


async def by_mcp(service: str, url: str) -> str:
    async with (
        streamable_http_client(f"{service}/mcp") as (read, write, *_),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        tools = await session.list_tools()
        print("MCP tools:", ", ".join(tool.name for tool in tools.tools))
        result = await session.call_tool("web_fetch", {"url": url})
        return "\n".join(getattr(part, "text", "") for part in result.content)


def main() -> None:
    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    url, port = f"http://127.0.0.1:{site.server_port}/owl", free_port()
    # What the command `search-fetch` runs, in this very Python.
    command = ["-c", "from deepinfer_search_fetch.cli import main; main()"]
    command += ["serve", "--port", str(port), "--no-auth"]
    command += ["--allow-cidr", "127.0.0.1/32", "--allow-port", str(site.server_port)]
    with tempfile.TemporaryDirectory() as home:
        environ = {**os.environ, "DEEPINFER_SEARCH_FETCH_HOME": home}
        service = subprocess.Popen([sys.executable, *command], env=environ)
        try:
            base = f"http://127.0.0.1:{port}"
            wait_for(f"{base}/healthz")
            rest = by_rest(base, url)
            print("REST:", rest[:60].replace("\n", " "))
            found = asyncio.run(by_mcp(base, url))
            print("MCP:", found[:60].replace("\n", " "))
            assert "hears a vole" in rest
            assert "hears a vole" in found
        finally:
            service.terminate()
            service.wait(30)
            site.shutdown()


if __name__ == "__main__":
    main()
