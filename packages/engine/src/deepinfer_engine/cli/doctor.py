"""`deepinfer doctor`: is this machine able to serve, and if not, what to do."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from deepinfer_engine.cli.launch import build_codec, build_runner, model_dir
from deepinfer_engine.cli.logs import setup_logging
from deepinfer_engine.core.constraint import ConstraintState
from deepinfer_engine.errors import ConstraintsUnavailable
from deepinfer_engine.server.run import bind
from deepinfer_engine.settings import Settings

CHECK_FAILED_EXIT = 6
_GIB = 1024**3
_SIBLINGS = ("recipe", "kvtier", "dspark", "eplb", "kernels")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `remedy` says what to do unless all is well."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def run_doctor(settings: Settings, *, as_json: bool) -> int:
    """Print every finding; 6 when one of them is a failure."""
    setup_logging("error")
    console = Console(highlight=False, soft_wrap=True)
    findings: list[Finding] = []
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for finding in examine(settings):
        findings.append(finding)
        if not as_json:
            colour = colours[finding.status]
            console.print(f"[{colour}]{finding.status:4}[/] {finding.name}:", end=" ")
            console.print(finding.detail, markup=False)
            if finding.remedy:
                console.print(f"     -> {finding.remedy}", markup=False)
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        print(
            json.dumps(
                {"ok": not failed, "checks": [asdict(finding) for finding in findings]}, indent=2
            )
        )
    return CHECK_FAILED_EXIT if failed else 0


def examine(settings: Settings) -> Iterator[Finding]:
    """Every finding, cheap ones first. A check that raises is a failure, not the end."""
    checks: tuple[tuple[str, Callable[[Settings], Finding]], ...] = (
        ("python", _python),
        ("packages", _packages),
        ("torch", _torch),
        ("compiler", _compiler),
        ("kernels", _kernels),
        ("memory", _memory),
        ("port", _port),
        ("cache directory", _cache_dir),
        ("tokenizer", _tokenizer),
        ("model", _model),
        ("constraints", _constraints),
    )
    for name, check in checks:
        try:
            yield check(settings)
        except Exception as exc:
            text = " ".join(str(exc).split()) or type(exc).__name__
            yield Finding(name, "fail", text, "fix what the message names and run this again")


def _python(_: Settings) -> Finding:
    where = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    detail = f"{platform.python_version()} on {where}"
    if platform.system() != "Linux":
        return Finding("python", "warn", detail, "only Linux is tested")
    return Finding("python", "ok", detail)


def _packages(_: Settings) -> Finding:
    versions: list[str] = []
    for name in _SIBLINGS:
        module = importlib.import_module(f"deepinfer_{name}")
        versions.append(f"{name} {module.__version__}")
    return Finding("packages", "ok", ", ".join(versions))


def _torch(_: Settings) -> Finding:
    import torch

    built = f"{torch.__version__}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        idle = torch.cuda.device_count()
        return Finding(
            "torch",
            "warn",
            f"{built}; {idle} GPU(s) seen and left idle",
            "models of this runtime compute on the CPU alone for now",
        )
    return Finding("torch", "ok", f"{built}, CPU")


def _compiler(_: Settings) -> Finding:
    name = os.environ.get("CXX") or "c++"
    if found := shutil.which(name):
        return Finding("compiler", "ok", found)
    return Finding(
        "compiler",
        "warn",
        f"no {name}",
        "a C++ compiler speeds up some CPU kernels; all work without",
    )


def _kernels(_: Settings) -> Finding:
    from deepinfer_engine.adapters.kernels import registry

    choices = [registry.choose(name) for name in registry.op_names()]
    counted = Counter(choice.impl.backend for choice in choices)
    detail = ", ".join(f"{count} operators {backend}" for backend, count in counted.most_common())
    degraded = [choice for choice in choices if choice.degraded]
    if degraded:
        backend, why = degraded[0].refused[0]
        return Finding("kernels", "warn", f"{detail}; {backend}: {why}", "all work, some slower")
    return Finding("kernels", "ok", detail)


def _memory(_: Settings) -> Finding:
    free = total = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _colon, rest = line.partition(":")
        if name in ("MemAvailable", "MemTotal"):
            value = int(rest.split()[0]) * 1024
            free, total = (value, total) if name == "MemAvailable" else (free, value)
    detail = f"{free / _GIB:.1f} GiB free of {total / _GIB:.1f}"
    if free < 2 * _GIB:
        return Finding(
            "memory",
            "warn",
            detail,
            "three processes want about 2 GiB; --single-process wants less",
        )
    return Finding("memory", "ok", detail)


def _port(settings: Settings) -> Finding:
    sock: socket.socket = bind(settings.host, settings.port)
    sock.close()
    return Finding("port", "ok", f"{settings.host}:{settings.port} is free")


def _cache_dir(settings: Settings) -> Finding:
    if not settings.cache:
        return Finding("cache directory", "ok", "no prompt cache on disk (--no-cache)")
    directory = settings.cache_dir
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryFile(dir=directory) as probe:
        probe.write(b"deepinfer")
    free = shutil.disk_usage(directory).free
    detail = f"{directory} is writable, {free / _GIB:.1f} GiB free"
    if free < _GIB:
        return Finding(
            "cache directory", "warn", detail, "free some space, or choose another --cache-dir"
        )
    return Finding("cache directory", "ok", detail)


def _tokenizer(settings: Settings) -> Finding:
    codec = build_codec(settings)
    sample = "Zwölf Boxkämpfer 12345 ✓\n\t 中文"
    ids = codec.tokenize(sample)
    back = codec.detokenize(ids)
    if back != sample:
        return Finding(
            "tokenizer",
            "fail",
            f"{sample!r} came back as {back!r}",
            "the tokenizer.json is damaged",
        )
    return Finding("tokenizer", "ok", f"{model_dir(settings)}, {len(ids)} tokens there and back")


def _model(settings: Settings) -> Finding:
    runner = build_runner(settings.model_copy(update={"num_blocks": 8, "max_num_seqs": 1}))
    caps = runner.caps
    context = f"{caps.max_model_len} tokens of context, vocabulary {caps.vocab_size}"
    detail = f"loads; {context}, {caps.nextn} drafts a step"
    return Finding("model", "ok", detail)


def _constraints(settings: Settings) -> Finding:
    """Compile a schema for the model's vocabulary and let wrong text run against it."""
    from deepinfer_engine.codec.choose import open_grammars
    from deepinfer_engine.codec.constraints import json_schema

    codec = build_codec(settings)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    try:
        grammars = open_grammars(model_dir(settings), codec.vocab_size)
    except ConstraintsUnavailable as exc:
        return Finding(
            "constraints",
            "warn",
            str(exc),
            'pip install "./packages/recipe[grammar]" "./packages/engine[grammar]" in the '
            "checkout; without it schemas are refused",
        )
    try:
        started = time.monotonic()
        grammar = grammars.submit(json_schema(schema).grammar).result()
        seconds = time.monotonic() - started
        right, wrong = codec.tokenize('{"ok": true}'), codec.tokenize('{"no": true}')
        if not _walks(ConstraintState(grammar, ""), right):
            return Finding("constraints", "fail", "a valid answer was refused", "see the log")
        if _walks(ConstraintState(grammar, ""), wrong):
            return Finding("constraints", "fail", "a wrong answer was let through", "see the log")
    finally:
        grammars.close()
    return Finding("constraints", "ok", f"a schema compiled in {seconds:.1f} s and was enforced")


def _walks(state: ConstraintState, tokens: Sequence[int]) -> bool:
    """Whether every token of a text is allowed where it stands."""
    rows = np.full((1 + len(tokens), state.mask_words), -1, dtype=np.int32)
    state.fill(rows, tokens)
    return all(int(row[t // 32]) >> (t % 32) & 1 for row, t in zip(rows, tokens, strict=False))
