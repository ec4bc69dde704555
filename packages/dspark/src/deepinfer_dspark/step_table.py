"""Measured step time by number of tokens in the verify batch, kept on disk with an expiry."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.errors import ShapeError, TableError

FORMAT: Final = 1
MAX_AGE_S: Final = 3600.0
MAX_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class StepTable:
    """A staircase: a step of b tokens costs as much as the smallest captured size >= b.

    sizes: captured batch sizes in tokens, strictly increasing.
    ms:    time of one target forward at each size; made monotone from the left, because a larger
           batch that measured faster is noise.
    above_last: "error" refuses batches above the last size, "linear" extrapolates the last slope
           (for engines without captured sizes).
    """

    sizes: tuple[int, ...]
    ms: tuple[float, ...]
    above_last: str = "linear"

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.ms):
            raise TableError(
                f"StepTable wants one time a size and at least one size, got {len(self.sizes)} "
                f"sizes and {len(self.ms)} times"
            )
        if any(b <= a for a, b in zip((0, *self.sizes), self.sizes, strict=False)):
            raise TableError(
                f"StepTable wants strictly increasing positive sizes, got {self.sizes}"
            )
        if not all(np.isfinite(m) and m > 0 for m in self.ms):
            raise TableError(f"StepTable wants finite positive times, got {self.ms}")
        if self.above_last not in ("error", "linear"):
            raise TableError(f"above_last is 'error' or 'linear', got {self.above_last!r}")
        object.__setattr__(self, "ms", tuple(np.maximum.accumulate(self.ms).tolist()))

    @classmethod
    def linear(
        cls, base_ms: float, ms_per_token: float, *, grid: int = 8, top: int = 2048
    ) -> StepTable:
        """base + slope * size on multiples of `grid`: a stand-in where nothing was measured."""
        sizes = tuple(range(grid, top + grid, grid))
        return cls(sizes, tuple(base_ms + ms_per_token * s for s in sizes))

    def cost(self, tokens: int) -> float:
        """Milliseconds of a step of `tokens` tokens, an integer of at least 0.

        Raises ShapeError for arguments that do not fit.
        """
        if tokens < 0 or int(tokens) != tokens:
            raise ShapeError(f"StepTable.cost wants an integer of at least 0, got {tokens}")
        return float(self.dense(tokens)[tokens])

    def size_for(self, tokens: int) -> int:
        """The captured size a batch of `tokens` runs at (itself above the last size)."""
        at = int(np.searchsorted(self.sizes, tokens))
        return self.sizes[at] if at < len(self.sizes) else tokens

    def dense(self, top: int) -> npt.NDArray[np.float64]:
        """float64 [top + 1]; cost of every batch size 0..top."""
        sizes, ms = np.asarray(self.sizes), np.asarray(self.ms)
        tokens = np.arange(top + 1)
        at = np.searchsorted(sizes, tokens)
        out = ms[np.minimum(at, sizes.size - 1)]
        beyond = tokens > sizes[-1]
        if beyond.any():
            if self.above_last == "error":
                out[beyond] = np.inf
            else:
                slope = 0.0
                if sizes.size > 1:
                    slope = (ms[-1] - ms[0]) / (sizes[-1] - sizes[0])
                out[beyond] = ms[-1] + slope * (tokens[beyond] - sizes[-1])
        return out

    @classmethod
    def measure(
        cls,
        step: Callable[[int], object],
        sizes: Sequence[int],
        *,
        warmup: int = 1,
        repeats: int = 5,
        clock: Callable[[], float] = time.perf_counter,
        reduce: Callable[[list[float]], list[float]] | None = None,
    ) -> StepTable:
        """Time `step(size)` for every size, largest first; drop the fastest and slowest, average.

        step:   runs one target forward of that many tokens and returns when it is finished.
        reduce: averages a list of times over a parallel group (all ranks call it once).
        clock:  seconds; injected by tests.

        Raises TableError for a table that cannot be made or read.
        """
        if repeats < 3:
            raise TableError(f"measure wants at least 3 repeats, got {repeats}")
        ordered = sorted(set(sizes))
        times: dict[int, float] = {}
        for size in reversed(ordered):
            for _ in range(warmup):
                step(size)
            runs: list[float] = []
            for _ in range(repeats):
                start = clock()
                step(size)
                runs.append((clock() - start) * 1e3)
            times[size] = statistics.fmean(sorted(runs)[1:-1])
        ms = [times[s] for s in ordered]
        return cls(tuple(ordered), tuple(ms if reduce is None else reduce(ms)))

    def save(self, directory: Path, key: Mapping[str, Any], *, now: float | None = None) -> Path:
        """Write atomically; `key` is everything the times depend on (model, device, sizes, ...)."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{table_key(key)}.json"
        body = {
            "format": FORMAT,
            "created": time.time() if now is None else now,
            "table": [[s, m] for s, m in zip(self.sizes, self.ms, strict=True)],
            "above_last": self.above_last,
        }
        # a name of its own for every writer: threads of one process save side by side too
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with temporary.open("x", encoding="utf-8") as f:
            json.dump(body, f)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
        return path

    @classmethod
    def load(
        cls,
        directory: Path,
        key: Mapping[str, Any],
        *,
        max_age_s: float = MAX_AGE_S,
        now: float | None = None,
    ) -> StepTable | None:
        """The saved table of `key`, or None if there is none or it is too old.

        Raises TableError for a file that is there but damaged.
        """
        path = directory / f"{table_key(key)}.json"
        if not path.exists():
            return None
        if not path.is_file():
            raise TableError(f"{path} is not a regular file: remove it")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TableError(f"{path} is larger than {MAX_FILE_BYTES} bytes: remove it")
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            age = (time.time() if now is None else now) - float(body["created"])
            if body["format"] != FORMAT or not 0 <= age <= max_age_s:
                return None
            pairs = [(int(s), float(m)) for s, m in body["table"]]
            above = str(body["above_last"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
            raise TableError(f"{path} is not a step-time table ({e}): remove it") from e
        return cls(tuple(s for s, _ in pairs), tuple(m for _, m in pairs), above)


def table_key(key: Mapping[str, Any]) -> str:
    """Hex name of a table: sha256 of the canonical JSON of its key."""
    text = json.dumps(dict(key), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class RuntimeCorrection:
    """What the table cannot know: sampling and drafting time, and the drift with context length.

    * fixed part by number of requests: median of the last 9 samples (from 5 on), else over all;
    * slope: median over sizes of the median of (measured - table) / size, never negative.
    """

    def __init__(self, table: StepTable, *, window: int = 5000) -> None:
        self._table = table
        self._window = window
        self._sampler: dict[int, list[float]] = {}
        self._recent: list[float] = []
        self._residuals: list[tuple[int, float]] = []
        self._next = 0
        self._slope = 0.0

    def update(self, requests: int, size: int, forward_ms: float, sampler_ms: float) -> None:
        """Record one step: `size` is the captured size it ran at; sampler_ms includes drafting."""
        self._push(self._sampler.setdefault(requests, []), sampler_ms)
        self._push(self._recent, sampler_ms)
        entry = (size, (forward_ms - self._table.cost(size)) / size)
        if len(self._residuals) < self._window:
            self._residuals.append(entry)
        else:
            self._residuals[self._next] = entry
            self._next = (self._next + 1) % self._window
        if len(self._residuals) % 64 == 10:
            self._refit()

    @staticmethod
    def _push(samples: list[float], value: float) -> None:
        samples.append(value)
        if len(samples) > 9:
            del samples[0]

    def _refit(self) -> None:
        by_size: dict[int, list[float]] = {}
        for size, value in self._residuals:
            by_size.setdefault(size, []).append(value)
        medians = [statistics.median(v) for v in by_size.values() if len(v) >= 10]
        self._slope = max(0.0, statistics.median(medians)) if medians else 0.0

    def fixed_ms(self, requests: int) -> float:
        """Milliseconds of a step that do not depend on how many drafts are verified."""
        own = self._sampler.get(requests, [])
        if len(own) >= 5:
            return statistics.median(own)
        return statistics.median(self._recent) if self._recent else 0.0

    @property
    def slope_ms(self) -> float:
        """Extra milliseconds a token of batch size on top of the table."""
        return self._slope
