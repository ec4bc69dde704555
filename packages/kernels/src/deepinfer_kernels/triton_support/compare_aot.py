"""``deepinfer-kernels aot``: the table of what was compiled, and what is worse than before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_kernels.errors import BackendError, ConfigError, NumericsError
from deepinfer_kernels.registry import default_registry

if TYPE_CHECKING:
    from deepinfer_kernels.triton_support.aot import Compiled

__all__ = ["RISE", "run", "worse"]

RISE = 1.1
"""Registers and shared memory may grow this much before it counts; a spill counts at once."""

Key = tuple[str, str, str]


def worse(row: Compiled, earlier: Mapping[Key, Mapping[str, Any]]) -> tuple[str, ...]:
    """What of this row breaks a limit or is worse than its earlier result."""
    before = earlier.get((row.kernel, row.variant, row.target))
    if before is None:
        return row.faults
    known = set(before["faults"])
    found = [fault for fault in row.faults if fault not in known]
    if row.stack > before["stack"]:
        found.append(f"stack {row.stack}, was {before['stack']}")
    for name in ("registers", "shared"):
        now, then = getattr(row, name), before[name]
        if now > then * RISE and now - then > (8 if name == "registers" else 1024):
            found.append(f"{name} {now}, was {then}")
    lost = sorted(set(before["families"]) - set(row.families))
    found += [f"no {family} instruction any more" for family in lost]
    return tuple(found)


def _read(path: str) -> dict[Key, Mapping[str, Any]]:
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
        return {(row["kernel"], row["variant"], row["target"]): row for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no table of `deepinfer-kernels aot --out`: {error}"
        ) from error


def run(
    ops: Sequence[str] | None,
    targets: Sequence[str],
    variants: int,
    against: str | None,
    out: str | None,
) -> int:
    """Print one line a kernel and target; 1 if one breaks a limit or is worse than before."""
    names = [default_registry.spec(name).name for name in ops or default_registry.op_names()]
    if list(targets) == ["ascend950"]:
        from deepinfer_kernels.triton_support import ascend

        return ascend.run(names, variants, out)
    earlier = {} if against is None else _read(against)
    if find_spec("triton") is None:
        raise BackendError("triton is not installed: pip install './packages/kernels[triton]'")
    from deepinfer_kernels.triton_support.aot import TARGETS, compile_all

    for target in targets:
        if target not in TARGETS:
            raise BackendError(
                f"no target {target!r}; there are: {', '.join(TARGETS)}, and ascend950 by itself"
            )
    rows: list[Compiled] = []
    broken = 0
    print(f"{'kernel':26} {'target':7} {'regs':>4} {'stack':>5} {'shared':>7} {'tmem':>4}  found")
    for row in compile_all(names, targets, variants):
        rows.append(row)
        found = ", ".join(row.families) or "-"
        faults = worse(row, earlier)
        broken += bool(faults)
        marks = "".join(f"  BROKEN: {fault}" for fault in faults)
        print(
            f"{row.kernel:26} {row.target:7} {row.registers:4} {row.stack:5} {row.shared:7} "
            f"{row.tmem:4}  {found}{marks}",
            flush=True,
        )
    if not rows:
        raise NumericsError("none of these operators has a Triton form")
    if out is not None:
        table = {"triton": metadata.version("triton"), "rows": [asdict(row) for row in rows]}
        Path(out).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} compilations, {broken} broken")
    return 1 if broken else 0
