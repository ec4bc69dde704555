"""The files beside the weights of a checkpoint directory. No torch."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from tokenizers import Tokenizer

from deepinfer_engine.core.sampling_params import SamplingDefaults, validate
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.errors import CheckpointError, RequestError

_SAMPLE_BYTES = 1 << 20
T = TypeVar("T")


def read_json(path: Path) -> Any:
    """A JSON file of a checkpoint. Raises OSError where it is no regular file, ValueError where it
    is not JSON."""
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise OSError("not a regular file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Read `tokenizer.json`. Raises CheckpointError when it is missing or unreadable."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, or not a regular file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a readable tokenizer ({error})") from None


def model_fingerprint(model_dir: Path, *, batch_invariant: bool = False) -> str:
    """Identity of a checkpoint: config and tokenizer whole, shards by name, size, and first and
    last MiB.

    batch_invariant: a cache written without that mode holds other bits, and is not taken.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in ("config.json", "tokenizer.json"):
        path = model_dir / name
        if path.is_file():
            digest.update(path.read_bytes())
    for shard in sorted(p for p in model_dir.glob("*.safetensors") if p.is_file()):
        size = shard.stat().st_size
        digest.update(f"{shard.name}:{size}:".encode())
        with shard.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest() + (" batch invariant" if batch_invariant else "")


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """`model_dir/config.json` as it stands. Raises CheckpointError."""
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise CheckpointError(
            f"{model_dir}: no such model directory; give a folder that holds config.json"
        )
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; is {model_dir} a model directory?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: wanted a JSON object, got {type(raw).__name__}")
    return cast("dict[str, Any]", raw)


def read_generation_config(model_dir: Path) -> dict[str, Any]:
    """generation_config.json, empty where there is none. Raises CheckpointError."""
    path = model_dir / "generation_config.json"
    if not path.exists():
        return {}
    try:
        raw = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: wanted a JSON object, got {type(raw).__name__}")
    return cast("dict[str, Any]", raw)


def sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """Those of generation_config.json. Raises CheckpointError naming a value out of range."""
    raw = read_generation_config(model_dir)
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    given = {name: raw[name] for name in names if raw.get(name) is not None}
    if given.get("top_k") == 0:
        del given["top_k"]
    try:
        defaults = SamplingDefaults(**given)
        validate(
            SamplingParams(**{name: getattr(defaults, name) for name in names}), vocab_size=1 << 30
        )
    except (RequestError, TypeError) as error:
        raise CheckpointError(f"{model_dir / 'generation_config.json'}: {error}") from None
    return defaults


def checked(model_dir: Path, read: Callable[[dict[str, Any]], T]) -> T:
    """config.json through the model of a family.

    Raises CheckpointError: the directory or file is missing, is not JSON, or a key has a value that
    this runtime cannot serve; the message names file, key and value.
    """
    raw = read_config_json(model_dir)
    ends = read_generation_config(model_dir).get("eos_token_id")
    if isinstance(ends, list):  # more ways to end than the config knows: chat models have them
        raw = {**raw, "eos_token_id": ends}
    try:
        config = read(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "config"
        shown = repr(first.get("input"))
        got = f", got {shown}" if len(shown) <= 60 else ""
        raise CheckpointError(
            f"{model_dir / 'config.json'}: {where}: {first['msg']}{got}"
        ) from None
    misspelt = _misspelt(raw, config, "") if isinstance(config, BaseModel) else None
    if misspelt is not None:
        raise CheckpointError(f"{model_dir / 'config.json'}: {misspelt}")
    return config


def _misspelt(raw: dict[str, Any], config: BaseModel, where: str) -> str | None:
    """A key nobody reads that is nearly one which the file lacks: it would be ignored in silence.

    Released files hold many keys that no runtime reads, so others pass.
    """
    fields = type(config).model_fields
    absent = [name for name in fields if name not in raw]
    for key in raw:
        if key not in fields:
            near = difflib.get_close_matches(key, absent, 1, cutoff=0.88)
            if near:
                return f"{where}{key}: unknown key; {where}{near[0]} was meant?"
    for name in fields:
        inner, below = getattr(config, name), raw.get(name)
        if isinstance(inner, BaseModel) and isinstance(below, dict):
            found = _misspelt(cast("dict[str, Any]", below), inner, f"{where}{name}.")
            if found is not None:
                return found
    return None
