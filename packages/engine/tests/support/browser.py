"""A headless Chromium, driven over the pipes of its DevTools protocol: no library is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
BROWSER = next((path for name in _NAMES if (path := shutil.which(name))), None)
# The pipes are descriptors 3 and 4 of the browser.
_WIRE_PIPES = 'exec 3<&0 4>&1 </dev/null >/dev/null; exec "$@"'
_LONGEST_S = 60.0
_KEYS = {
    "Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " "),
}  # fmt: skip


class Page:
    """One page. Waiting is for something to come true, at most a minute."""

    def __init__(self, profile: Path, width: int, height: int = 900) -> None:
        assert BROWSER is not None
        command = [
            BROWSER, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WIRE_PIPES, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._ids = itertools.count(1)
        self._session: str | None = None
        self.errors: list[str] = []
        """What the page threw or could not load."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        found = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip

    def close(self) -> None:
        os.killpg(self._process.pid, 9)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && document.body.dataset.busy === 'no'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """The first true value of an expression; of a node just that it is there."""
        expression = f"(value => value instanceof Node ? true : value)({expression})"
        end = time.monotonic() + _LONGEST_S
        while not (value := self.run(expression)):
            assert time.monotonic() < end, f"{expression} did not come true:\n{self.text()}"
            time.sleep(0.05)
        return value

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = _KEYS[key]
        common = {
            "key": key, "code": {" ": "Space"}.get(key, key), "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }  # fmt: skip
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self._call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def focused(self) -> str:
        """Id of the element that has the keyboard, else its text."""
        return self.run("document.activeElement.id || document.activeElement.textContent.trim()")

    def tab_to(self, wanted: str) -> list[str]:
        """Press Tab until an element has the keyboard; what had it before."""
        seen: list[str] = []
        while (now := self.focused()) != wanted:
            assert len(seen) < 60, f"Tab never reaches {wanted}: {seen}"
            seen.append(now)
            self.press("Tab")
        return seen

    def text(self, selector: str = "body") -> str:
        return self.run(f"(document.querySelector({json.dumps(selector)}) || {{}}).innerText || ''")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._event(answer)

    def _event(self, message: dict[str, Any]) -> None:
        if message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        elif message["method"] == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    def _receive(self) -> dict[str, Any]:
        data = bytearray()
        read: Callable[[int], bytes] = self._process.stdout.read1
        while not data.endswith(b"\0"):
            # Whole messages: one byte at a time behind what may already be the next one.
            part = self._rest or read(1 << 16)
            self._rest = b""
            assert part, "the browser is gone"
            head, mark, self._rest = part.partition(b"\0")
            data += head + mark
        return json.loads(data[:-1])

    _rest = b""
