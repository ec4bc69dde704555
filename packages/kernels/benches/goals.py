"""What this package promises to show without a GPU, line by line: held, not held, or not asked.

    python packages/kernels/benches/goals.py REPORTS    (`nox -s kernels_goals` makes the reports)

Every verdict is read from what a run left in the folder REPORTS: junit files of the tests, the
table of `deepinfer-kernels aot`, results of `deepinfer-kernels bench`, the lowering for Ascend.
What no report tells is "not shown". Lines that count things decide the exit code; lines of speed
are figures of this machine in this run, and decide nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepinfer_kernels.registry import default_registry

ROOT = Path(__file__).parents[3]
State = Literal["held", "not held", "not asked", "not shown"]

BATCH = "packages/engine/src/deepinfer_engine/model/v41/batch.py"
CORE = "packages/engine/src/deepinfer_engine/core"
DSPARK = "packages/dspark/src/deepinfer_dspark"
TORCH = "torch's own call does it"
SECTION: Mapping[str, tuple[str, ...] | str] = {
    "A1 sparse latent attention over records": ("mla_decode_sparse",),
    "A2 sparse latent attention, prefill": ("mla_sparse",),
    "A3 fused with rotation and cast": ("mla_query_key", "mla_output"),
    "A4 window attention": ("mla_decode_sparse",),
    "A5 dense attention of the vision encoder": TORCH,
    "A6 attention of a draft block": ("mla_decode_sparse",),
    "I1 index scores": ("index_logits",),
    "I2 index scores over pages": ("index_topk",),
    "I3 index scores of candidate runs": ("index_topk",),
    "I4 selection": ("topk_select",),
    "I5 peaks of runs": ("candidate_blocks",),
    "I6 lengths of candidates": ("index_topk",),
    "I7 candidates to entries": ("index_topk",),
    "I8 entries to slots": f"{BATCH}::def entry_slots",
    "I9 ranges to lists": f"{BATCH}::def all_entries",
    "I10 lists joined": ("mla_decode_sparse",),
    "I11 window lists": f"{BATCH}::def ring_reads",
    "C1 records stored": ("kv_store",),
    "C2 records loaded": ("kv_load",),
    "C3 rows gathered": TORCH,
    "C4 state between rings": f"{BATCH}::def snapshot_pairs",
    "C5 compression": ("compress_pool",),
    "C6 metadata of a decode step": f"{BATCH}::class Batch",
    "N1 norm with residual": ("rms_norm", "add_rms_norm"),
    "N2 norm, rotation, cast": ("norm_rope_quant",),
    "N3 quantisation": ("fake_quant",),
    "N4 gated activation": ("swiglu", "silu_mul"),
    "M1 hyper-connections before": ("mhc_pre",),
    "M2 Sinkhorn": ("mhc_pre",),
    "M3 hyper-connections after": ("mhc_post",),
    "M4 both with norm": ("mhc_post_pre_norm",),
    "G1 n-gram rows": ("engram_hash",),
    "G2 n-gram gather": TORCH,
    "G3 n-gram gate": ("engram_gate",),
    "P1 product of block-scaled matrices": ("grouped_mx_linear",),
    "P2 bfloat16 product": TORCH,
    "P3 grouped output product": ("mla_output",),
    "P4 grouped MXFP4 product": ("grouped_mx_linear",),
    "P5 whole expert layer": ("moe_layer",),
    "P6 gate": ("moe_gate",),
    "P7 permutation of tokens": ("moe_experts",),
    "E1 dispatch": "packages/kernels/src/deepinfer_kernels/ep/dispatch.py::def ep_dispatch",
    "E2 combine": "packages/kernels/src/deepinfer_kernels/ep/dispatch.py::def ep_combine",
    "S1 sampling, S4 truncation": f"{DSPARK}/sampling.py::def scale_and_truncate",
    "S2 verification, S3 accepted prefix": f"{DSPARK}/verification.py::class Verifier",
    "S5 log-probabilities": f"{DSPARK}/verification.py::def _with_logprobs",
    "S6 grammar mask": f"{CORE}/masks.py::def mask_rows",
    "Z1-Z3 overlapped steps": f"{CORE}/overlap.py::class OverlappedLoop",
    "Z4 verification budget": f"{DSPARK}/budget.py::class BudgetScheduler",
    "Z5 draft module": "packages/engine/src/deepinfer_engine/model/v41/draft.py::class Drafter",
    "Z8 numbers that are not finite": f"{DSPARK}/backend.py::np.isfinite",
}
"""The operators that a V4.1 server needs, and who has them: operators here, or file::text."""

LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "Z6 inputs of a captured graph": ("CUDAGraph", "make_graphed_callables"),
    "Z7 mirrored context parallelism": ("context_parallel", "ContextParallel"),
}
"""What nothing of this repository would call, and the words by which a caller would be known.

What a package offers is reachable from the server, or it is not offered. The engine runs on CPUs,
where no graph is captured, and a sequence's context is never split over processes. Once one of the
words stands in its sources, the operator is missed here.
"""

FUSED = (
    "mhc_pre", "mhc_pre_norm", "mhc_post_pre_norm", "norm_rope_quant", "fake_quant", "kv_store",
    "kv_load",
    "engram_gate", "candidate_blocks", "add_rms_norm", "qkv_rope_store", "mhc_collapse",
    "mhc_post", "compress_pool", "silu_mul",
)  # fmt: skip
"""Elementwise groups: several torch calls that stand in one operator."""
GAIN = 5

EXEMPT: Mapping[tuple[str, str], str] = {}
"""(kernel, target) that may spill, with the reason; three at most."""


@dataclass(frozen=True, slots=True)
class Verdict:
    state: State
    detail: str


class Reports:
    """What the runs left. A missing file is an empty answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def json(self, name: str) -> Any:
        path = self._folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def tests(self, name: str, part: str = "") -> tuple[int, list[str]]:
        """(tests that ran with ``part`` in their name, those of them that failed)."""
        path = self._folder / name
        if not path.is_file():
            return 0, []
        ran, failed = 0, []
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            label = case.get("name", "")
            if part not in label or case.find("skipped") is not None:
                continue
            ran += 1
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(label)
        return ran, failed


def _tested(reports: Reports, wanted: Mapping[str, tuple[str, str, int]]) -> Verdict:
    """wanted: what -> (junit file, part of the tests' names, tests at least)."""
    counts: list[str] = []
    state: State = "held"
    for what, (file, part, least) in wanted.items():
        ran, failed = reports.tests(file, part)
        counts.append(f"{what} {ran - len(failed)} of {max(ran, least)}")
        if failed:
            state = "not held"
        elif ran < least and state == "held":
            state = "not shown"
    return Verdict(state, ", ".join(counts))


def operators(reports: Reports) -> Verdict:
    names = default_registry.op_names()
    return _tested(
        reports,
        {
            "opcheck": ("library.xml", "test_operator_passes_opcheck", len(names)),
            "fake form": ("library.xml", "test_fake_form_gives", len(names)),
            "fuzz of CPU forms": ("library.xml", "test_back_end_agrees", len(names)),
            "float64 twins": ("library.xml", "test_reference_agrees", 1),
        },
    )


def section(reports: Reports) -> Verdict:
    """Each operator that is called is here, or in the sibling that is named, or torch's own."""
    known = set(default_registry.op_names())
    owned: dict[str, list[str]] = {"here": [], "torch": [], "siblings": [], "nobody": []}
    for name, owner in SECTION.items():
        if not isinstance(owner, str):
            owned["here" if known.issuperset(owner) else "nobody"].append(name)
        elif owner == TORCH:
            owned["torch"].append(name)
        else:
            path, _, text = owner.partition("::")
            file = ROOT / path
            there = file.is_file() and text in file.read_text(encoding="utf-8")
            owned["siblings" if there else "nobody"].append(name)
    sources = [
        path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "packages" / "engine" / "src").rglob("*.py"))
    ]
    called = [
        name
        for name, words in LEFT_OUT.items()
        if any(word in source for source in sources for word in words)
    ]
    missing = owned.pop("nobody") + called
    detail = ", ".join(f"{len(names)} {who}" for who, names in owned.items())
    if missing:
        return Verdict("not held", f"{detail}; nobody has {'; '.join(missing)}")
    return Verdict("held", f"{detail}; left out, since nothing calls them: {'; '.join(LEFT_OUT)}")


def interpreted(reports: Reports) -> Verdict:
    names = default_registry.op_names()
    forms = [n for n in names if {"triton", "sm100"} & set(default_registry.impls(n))]
    ran, failed = reports.tests("interpreter.xml", "test_form_agrees")
    passed = ran - len(failed)
    detail = f"{len(forms)} of {len(names)} have a form; {passed} of {ran} pass"
    if not ran:
        return Verdict("not shown", detail)
    return Verdict("held" if passed >= 0.9 * len(names) and not failed else "not held", detail)


def repaired(reports: Reports) -> Verdict:
    return _tested(
        reports,
        {
            "all codes": ("interpreter.xml", "test_every_code", 3),
            "a million floats": ("interpreter.xml", "test_a_million", 3),
        },
    )


def mutations(reports: Reports) -> Verdict:
    return _tested(reports, {"caught": ("interpreter.xml", "test_mutated_kernel", 10)})


def compiled(reports: Reports) -> Verdict:
    rows = (reports.json("aot.json") or {}).get("rows", [])
    if not rows:
        return Verdict("not shown", "no table")
    bad = [
        f"{row['kernel']} for {row['target']}: {', '.join(row['faults'])}"
        for row in rows
        if row["faults"] and (row["kernel"], row["target"]) not in EXEMPT
    ]
    kernels = {row["kernel"] for row in rows}
    targets = sorted({row["target"] for row in rows})
    detail = (
        f"{len(kernels)} kernels, {len(rows)} compilations for {', '.join(targets)}; "
        f"{len(bad)} at fault, {len(EXEMPT)} exempt"
    )
    return Verdict("not held" if bad else "held", "; ".join([detail, *bad]))


def tensor_cores(reports: Reports) -> Verdict:
    rows = (reports.json("aot.json") or {}).get("rows", [])
    found: list[str] = []
    good = True
    for kernel in ("mla_decode_sparse_sm100_kernel", "grouped_mx_linear_sm100_kernel"):
        mine = [row for row in rows if row["kernel"] == kernel and row["target"] == "sm100a"]
        good = good and bool(mine)
        good = good and all("tcgen05" in r["families"] and not r["faults"] for r in mine)
        found += [
            f"{kernel} {r['registers']} registers, stack {r['stack']}, {r['tmem']} columns, "
            f"{'/'.join(r['families'])}"
            for r in mine
        ] or [f"{kernel}: not compiled"]
    return Verdict(("held" if good else "not held") if rows else "not shown", "; ".join(found))


def ascend(reports: Reports) -> Verdict:
    found = reports.json("ascend.json")
    if found is None:
        return Verdict("not shown", "the Ascend environment could not be made here")
    rows = found["rows"]
    lowered = {row["op"] for row in rows if row["stage"] == "hivm"}
    lowered -= {row["op"] for row in rows if row["stage"] != "hivm"}
    over = [row["kernel"] for row in rows if row["ub_bytes"] > 256 * 1024]
    most = max((row["ub_bytes"] for row in rows), default=0)
    detail = (
        f"{len(lowered)} operators lower to HIVM whole, at most {most} bytes of unified buffer; "
        f"triton-ascend {found['triton']}"
    )
    return Verdict("held" if len(lowered) >= 15 and not over else "not held", detail)


def launches(reports: Reports) -> Verdict:
    counted = _tested(
        reports,
        {
            "C++": ("library.xml", "index_work_of_a_decode_step", 1),
            "Triton": ("interpreter.xml", "index_work_of_a_decode_step", 1),
        },
    )
    detail = "one call in C++; 5 launches in Triton: 3 where runs are kept, 2 within them"
    return Verdict(counted.state, f"{counted.detail} counted: {detail}")


def _best(found: Any, op: str, backend: str) -> dict[str, Any]:
    """Shape to row."""
    return {r["shape"]: r for r in found["rows"] if r["op"] == op and r["backend"] == backend}


def _largest(found: Any, op: str) -> list[dict[str, Any]]:
    """The native row of the largest shape of each record format, or of the operator."""
    rows: dict[str, dict[str, Any]] = {}
    for shape, row in _best(found, op, "native").items():
        record = shape.split()[0] if " " in shape else ""
        if row["bytes"] >= rows.get(record, row)["bytes"]:
            rows[record] = row
    return list(rows.values())


def fused(reports: Reports) -> Verdict:
    """At the full model's sizes in bfloat16; a group whose product alone takes longer is named.

    Whatever the dtype, these groups multiply in float32: that rate bounds what any form can gain.
    """
    small, large = reports.json("bench.json"), reports.json("bench-large.json")
    if small is None or large is None:
        return Verdict("not shown", "no bench")
    rate = small["ceilings"]["matmul_gflop_per_s"]
    gains: dict[str, float] = {}
    bound: list[str] = []
    for op in FUSED:
        reference = _best(large, op, "reference")
        for row in _largest(large, op):
            gain = row["times_reference"]
            most = reference[row["shape"]]["best_us"] / (row["flops"] / rate / 1e3)
            if gain < GAIN and most < GAIN:
                bound.append(f"{op} {gain:.1f}, at most {most:.1f} by its float32 product")
            else:
                gains[op] = min(gain, gains.get(op, gain))
    first = {op: next(iter(_best(small, op, "native").values())) for op in FUSED}
    few = {op: r["times_reference"] for op, r in first.items() if r["times_reference"] < GAIN}
    said = ", ".join(f"{op} {gain:.1f}" for op, gain in sorted(gains.items(), key=lambda x: x[1]))
    said = f"times the reference: {said}"
    if bound:
        said += f"; bound: {', '.join(bound)}"
    if few:
        rows = ", ".join(f"{op} {gain:.1f}" for op, gain in sorted(few.items(), key=lambda x: x[1]))
        said += f"; below {GAIN} on the few rows of a small model's step, in float32: {rows}"
    return Verdict("not held" if min(gains.values()) < GAIN else "held", said)


def experts(reports: Reports) -> Verdict:
    found = reports.json("bench-large.json")
    if found is None:
        return Verdict("not shown", "no bench")
    rate = found["ceilings"]["matmul_gflop_per_s"]
    mine = [r for r in found["rows"] if r["op"] == "moe_experts" and r["backend"] != "reference"]
    biggest = max(row["flops"] for row in mine)
    best = max(
        (row["flops"] / row["best_us"] / 1e3 / rate, row["backend"], row["shape"])
        for row in mine
        if row["flops"] == biggest
    )
    share, backend, shape = best
    detail = f"{share:.0%} of {rate:.0f} GFLOP/s on {shape} ({backend}, {found['threads']} threads)"
    return Verdict("held" if share >= 0.6 else "not held", detail)


def device(reports: Reports) -> Verdict:
    return Verdict(
        "not asked",
        "no GPU here: kernels are compiled and interpreted, not run, and our engine refuses "
        "`LLM(device='cuda')` by name",
    )


LINES = {
    "every operator has a reference, a fake form, fuzz and opcheck": operators,
    "every operator that a V4.1 server calls is here or has its owner": section,
    "9 of 10 operators have a Triton form that passes in the interpreter": interpreted,
    "the interpreter's repair: no mismatch against torch": repaired,
    "a mutated kernel is caught by the fuzz": mutations,
    "every Triton form compiles for four targets without spills": compiled,
    "A1 and P4 have tcgen05 forms for sm_100a without spills": tensor_cores,
    "15 operators lower to HIVM within 256 KB of unified buffer": ascend,
    "index and metadata work of a decode step: 6 launches at most": launches,
    "fused elementwise groups on the CPU, full sizes: 5 times the reference (speed)": fused,
    "grouped bfloat16 experts: 60% of oneDNN's measured rate (speed)": experts,
    "a GPU: captured graphs, evidence files, `LLM(device='cuda')`": device,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", type=Path, help="folder of the runs' reports")
    options = parser.parse_args()
    reports = Reports(options.reports)
    broken = 0
    for line, judge in LINES.items():
        verdict = judge(reports)
        expected = verdict.state in {"held", "not asked"} or "(speed)" in line
        broken += not expected
        print(f"{verdict.state.upper():9}  {line}\n           {verdict.detail}")
    print(f"{len(LINES)} lines, {broken} not as promised")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
