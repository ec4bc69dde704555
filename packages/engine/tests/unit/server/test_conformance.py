"""The codec's own conformance check, over HTTP against this server."""

from __future__ import annotations

import subprocess
import sys

from server_fakes import EOS, FakeEngine, Script, byte_codec
from server_socket import serving

from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings
from deepinfer_recipe import SpecialToken

MARK = SpecialToken.Dsml.value
CALL = f"""I ask.</think>

<{MARK} calls>
<{MARK} invoke name="weather">
<{MARK} parameter name="town" string="true">Oslo</{MARK} parameter>
</{MARK} invoke>
</{MARK} calls>"""


def build():
    codec = byte_codec()

    def script(request):
        prompt = codec.detokenize(request.token_ids)
        calls = "weather" in prompt and "<tool_result>" not in prompt
        said = CALL if calls else "Two and two.</think>Four."
        if not prompt.endswith("<think>"):
            said = said.partition("</think>")[2]
        ids = [*codec.tokenize(said), EOS]
        return Script([ids[i : i + 3] for i in range(0, len(ids), 3)], cached=4)

    return create_app(FakeEngine(script), codec, Settings())


def test_the_server_passes_the_check_of_the_codec():
    with serving(build) as server:
        command = ["-m", "deepinfer_recipe.cli", "check", "--model", "toy", "--url", server.url]
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "78 cases" in done.stdout
