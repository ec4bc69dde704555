"""What a load is made of: sessions, each a list of requests that follow one another.

Prompts are token ids of the server's own vocabulary, so that their lengths are exact, and follow
from a seed alone: the same load can be run again, and equal beginnings are equal tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer_engine.errors import ConfigError

BLOCK = 512
"""Tokens that one id of `hash_ids` stands for in a Mooncake trace."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `pause_s`: wait before it, behind the one before. `grows`: the prompt begins
    with the whole prompt and answer of the turn before."""

    tokens: tuple[int, ...]
    output_tokens: int
    pause_s: float = 0.0
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of one user. `at_s`: when it begins, for loads with times of their own."""

    turns: tuple[Turn, ...]
    at_s: float | None = None


class Words:
    """Token ids to write prompts with."""

    def __init__(self, ids: Sequence[int]) -> None:
        """ids: tokens of ordinary text; several of them."""
        self._ids = tuple(dict.fromkeys(ids))
        if len(self._ids) < 2:
            raise ConfigError("the server's tokenizer gives one token for any text")

    def write(self, name: str, length: int) -> tuple[int, ...]:
        """So many tokens; the same for the same name."""
        return tuple(random.Random(name).choices(self._ids, k=length))


def plain(
    words: Words, *, requests: int, prompt_tokens: int, output_tokens: int, shared: int, seed: int
) -> Iterator[Session]:
    """Requests of one length, the first `shared` tokens of all of them equal."""
    shared = min(shared, prompt_tokens)
    common = words.write(f"{seed} shared", shared)
    for number in range(requests):
        own = words.write(f"{seed} {number}", prompt_tokens - shared)
        yield Session((Turn((*common, *own), output_tokens),))


def agents(
    words: Words,
    *,
    sessions: int,
    turns: int,
    shared: int,
    prompt_tokens: int,
    output_tokens: int,
    pause_s: float,
    seed: int,
) -> Iterator[Session]:
    """Agents with one system prompt of `shared` tokens: every turn adds `prompt_tokens` to all that
    was said before."""
    common = words.write(f"{seed} shared", shared)
    for session in range(sessions):
        made: list[Turn] = []
        for turn in range(turns):
            own = words.write(f"{seed} {session} {turn}", prompt_tokens)
            start = common if turn == 0 else ()
            made.append(Turn((*start, *own), output_tokens, pause_s if turn else 0.0, turn > 0))
        yield Session(tuple(made))


def mooncake(
    words: Words, lines: Iterable[str], *, requests: int | None, speed: float, scale: float
) -> Iterator[Session]:
    """A trace in Mooncake's form: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    speed: times as fast. scale: lengths are multiplied by it, so that a small model can replay a
    trace of a large one; equal hash ids stay equal tokens. Raises ConfigError naming the line.
    """
    block = max(1, round(BLOCK * scale))
    number = 0
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if requests is not None and number >= requests:
            return
        number += 1
        try:
            entry = json.loads(line)
            at = float(entry["timestamp"]) / 1000 / speed
            length, output = int(entry["input_length"]), int(entry["output_length"])
            hashes = [int(one) for one in entry["hash_ids"]]
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(
                f"line {place} of the trace is not Mooncake's form: {exc!r}"
            ) from None
        if length < 1 or output < 0 or at < 0:
            raise ConfigError(f"line {place} of the trace: lengths and times are not negative")
        wanted = max(1, round(length * scale))
        tokens: list[int] = []
        for one in hashes:
            tokens += words.write(f"block {one}", block)
        if len(tokens) < wanted:  # a last block that is not full has no id
            tokens += words.write(f"rest {place}", wanted - len(tokens))
        turn = Turn(tuple(tokens[:wanted]), max(1, round(output * scale)))
        yield Session((turn,), at)


def read_trace(path: Path) -> list[str]:
    """Its lines. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the trace {path}: {exc}") from exc
