"""`deepinfer generate`: a file of requests in, a file of answers out, in the same order.

Results are appended line by line, so a run that was cut goes on where it was; lines that failed are
asked again. Each result holds a digest of the request it answers: going on with another input is
refused. Input may come from standard input, which is read whole first.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepinfer_engine.cli.logs import setup_logging
from deepinfer_engine.codec.errors import InvalidRequest, wire_error
from deepinfer_engine.codec.protocol import Codec
from deepinfer_engine.errors import ConfigError, RequestError
from deepinfer_engine.router.client import EngineClient
from deepinfer_engine.server.clock import SystemClock
from deepinfer_engine.server.generation import Generation
from deepinfer_engine.server.metrics import Metrics
from deepinfer_engine.settings import Settings


@dataclass(frozen=True, slots=True)
class Line:
    """One non-empty line of the input; numbers start at 1."""

    number: int
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode(errors="surrogateescape")).hexdigest()[:16]


def run_generate(
    settings: Settings,
    source: Path,
    target: Path,
    *,
    strict: bool,
    concurrency: int,
    console: Console,
) -> int:
    """Answer what `target` does not hold yet; source `-` is standard input. 1 when a line failed;
    with `strict` the first such line ends the run."""
    setup_logging("warning")
    lines = list(_read(source))
    done = answered(target, {line.number: line for line in lines})
    todo = [line for line in lines if line.number not in done]
    failed = asyncio.run(_generate(settings, source, todo, target, strict, concurrency, console))
    _in_order(target)
    return 1 if failed else 0


async def _generate(
    settings: Settings,
    source: Path,
    todo: list[Line],
    target: Path,
    strict: bool,
    concurrency: int,
    console: Console,
) -> int:
    from deepinfer_engine.cli.launch import build_codec, launched_engine

    codec = build_codec(settings)
    alone = settings.model_copy(update={"single_process": True, "ep": 1, "prefill_ep": 1})
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    failed = 0
    with target.open("a", encoding="utf-8") as out:
        async with launched_engine(alone) as engine:
            with Progress(*columns, console=console) as progress:
                bar = progress.add_task("answering", total=len(todo))
                async with aclosing(answers(engine, codec, todo, concurrency)) as results:
                    async for line, result in results:
                        progress.advance(bar)
                        if "error" in result:
                            failed += 1
                            message = result["error"]["message"]
                            console.print(
                                f"{source}:{line.number}: {message}",
                                style="red",
                                highlight=False,
                                markup=False,
                                soft_wrap=True,
                            )
                            if strict:
                                return failed
                        _write(out, line, result)
    again = "; run the command again to ask those once more" if failed else ""
    console.print(f"{len(todo) - failed} answered, {failed} failed{again}", highlight=False)
    return failed


async def answers(
    engine: EngineClient, codec: Codec, lines: list[Line], concurrency: int
) -> AsyncGenerator[tuple[Line, dict[str, Any]], None]:
    """Results in input order, with at most `concurrency` requests running ahead of the one waited
    for.
    """
    limit = (await engine.model_info()).max_model_len
    metrics, clock = Metrics(), SystemClock()

    async def one(line: Line) -> dict[str, Any]:
        try:
            prepared = codec.prepare("chat", _body(line.text, codec), limit)
            generation = Generation(engine, prepared, "chat", metrics, clock)
            async with aclosing(generation.events()) as batches:
                async for _ in batches:
                    pass
            return {"response": json.loads(generation.body())}
        except RequestError as exc:
            return wire_error(exc, "chat", f"line {line.number}").body

    running: list[tuple[Line, asyncio.Task[dict[str, Any]]]] = []
    waiting = iter(lines)
    try:
        while True:
            while len(running) < concurrency and (line := next(waiting, None)) is not None:
                running.append((line, asyncio.create_task(one(line))))
            if not running:
                return
            line, task = running[0]
            result = await task
            running.pop(0)
            yield line, result
    finally:
        for _, task in running:
            task.cancel()
        if running:
            await asyncio.wait([task for _, task in running])


def _body(text: str, codec: Codec) -> bytes:
    """The request of a line: a Chat Completions body, or a batch entry with one as `body`."""
    if any(0xDC80 <= ord(c) <= 0xDCFF for c in text):
        raise InvalidRequest("not UTF-8")
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"not JSON: {exc}") from exc
    body = entry.get("body", entry) if isinstance(entry, dict) else None
    if not isinstance(body, dict):
        raise InvalidRequest("wanted a JSON object")
    body = {"model": codec.model_names[0], **body}
    for name in ("stream", "stream_options"):
        body.pop(name, None)
    return json.dumps(body).encode()


def _write(out: TextIO, line: Line, result: dict[str, Any]) -> None:
    head: dict[str, Any] = {"line": line.number, "input": line.digest}
    try:
        entry = json.loads(line.text)
    except (ValueError, RecursionError):
        entry = None
    if isinstance(entry, dict) and "custom_id" in entry:
        head["custom_id"] = entry["custom_id"]
    out.write(json.dumps({**head, **result}, ensure_ascii=False) + "\n")
    out.flush()


def _read(source: Path) -> Iterator[Line]:
    try:
        data = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read {source}: {exc.strerror}") from exc
    # A damaged byte spoils its own line. Split at newlines alone: other separators may stand
    # inside JSON strings.
    text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="surrogateescape")
    texts = text.split("\n")
    for number, text in enumerate(texts, start=1):
        if text.strip():
            yield Line(number, text)


def answered(target: Path, lines: dict[int, Line]) -> set[int]:
    """Numbers of the lines whose answers are there; torn and failed results are taken out.

    Raises ConfigError when the file is something else, or answers another input.
    """
    if not target.exists():
        if not target.parent.is_dir():
            raise ConfigError(f"the directory of {target} does not exist")
        return set()
    if target.is_dir():
        raise ConfigError(f"{target} is a directory; name a file in it")
    data = target.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    done: dict[int, bytes] = {}
    results = whole.splitlines(keepends=True)
    for text in results:
        try:
            result = json.loads(text)
            number, digest = result["line"], result["input"]
        except (ValueError, TypeError, KeyError) as exc:
            raise ConfigError(
                f"{target} is not a result file of this command; choose another name"
            ) from exc
        if "error" in result:
            continue
        if number not in lines or lines[number].digest != digest:
            raise ConfigError(
                f"{target} answers another input (line {number}); choose another name"
            )
        done[number] = text
    if len(done) < len(results) or len(whole) < len(data):
        _replace(target, done.values())
    return set(done)


def _in_order(target: Path) -> None:
    """Answers to lines that were asked again stand at the end: put them in their places."""
    with target.open("rb") as opened:
        results = [(json.loads(text)["line"], text) for text in opened]
    numbers = [number for number, _ in results]
    if numbers != sorted(numbers):
        _replace(target, (text for _, text in sorted(results)))


def _replace(target: Path, results: Iterable[bytes]) -> None:
    part = target.with_name(target.name + ".part")
    with part.open("wb") as out:
        out.writelines(results)
    os.replace(part, target)
