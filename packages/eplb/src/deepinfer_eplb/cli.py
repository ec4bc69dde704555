"""`deepinfer-eplb`: plan from recorded loads, judge plans, draw them, run the live examples."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb import __version__
from deepinfer_eplb.bench.compare import HEAD, Case, Row, compare, compare_recorded
from deepinfer_eplb.bench.files import read_loads, read_placement, write_plan
from deepinfer_eplb.bench.loads import KINDS, generate
from deepinfer_eplb.errors import EplbError, LoadError
from deepinfer_eplb.evaluation import evaluate, rank_loads, rank_shares
from deepinfer_eplb.placement import initial_placement
from deepinfer_eplb.planning.planner import plan
from deepinfer_eplb.planning.solver import compiled

LOADS_HELP = "recorded loads [steps, layers, experts]: .npy, or SGLang's recording .pt or .json"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (EplbError, OSError, ImportError) as e:
        print(f"deepinfer-eplb: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepinfer-eplb", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    make = commands.add_parser("plan", help="a placement from recorded loads")
    make.set_defaults(run=_plan)
    make.add_argument("--loads", type=Path, required=True, help=LOADS_HELP)
    make.add_argument("--ranks", type=int, required=True, help="ranks that share the experts")
    make.add_argument("--slots", type=int, required=True, help="of all ranks together, a layer")
    make.add_argument("--old", type=Path, help="placement in force, .npy or .json: move little")
    make.add_argument("--old-ranks", type=int, help="ranks of --old, if it was another number")
    make.add_argument("--groups", type=int, default=1, help="expert groups of the router")
    make.add_argument("--nodes", type=int, default=1, help="machines that they stand on")
    make.add_argument("--totals", action="store_true", help="balance sums, not single steps")
    make.add_argument(
        "--output",
        type=Path,
        required=True,
        help=".json for SGLang's --init-expert-location, .npz with phy2log, log2phy, logcnt",
    )
    make.add_argument(
        "--first-moe-layer",
        type=int,
        default=0,
        help="layer of the model that the first row of --loads is, for .json (default 0)",
    )

    bench = commands.add_parser("bench", help="table of balance on unseen steps, beside baselines")
    bench.set_defaults(run=_bench)
    bench.add_argument("--loads", type=Path, help=f"{LOADS_HELP}; instead of generated ones")
    bench.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    bench.add_argument("--seeds", type=int, nargs="+", default=[1], help="of the generated loads")
    bench.add_argument("--layers", type=int, default=58, help="of the model")
    bench.add_argument("--experts", type=int, default=384, help="of a layer")
    bench.add_argument("--ranks", type=int, default=64, help="ranks that share them")
    bench.add_argument("--slots", type=int, default=448, help="of all ranks together, a layer")
    bench.add_argument("--repeats", type=int, default=3, help="timed runs; the median is printed")
    bench.add_argument("--json", type=Path, help="write the rows here too")

    draw = commands.add_parser("draw", help="rank loads before and after a plan: .svg, .png, .pdf")
    draw.set_defaults(run=_draw)
    draw.add_argument("output", type=Path, help="the picture; its suffix decides the format")
    draw.add_argument("--kind", choices=sorted(KINDS), default="skew")
    draw.add_argument("--seed", type=int, default=1, help="of the generated load")
    draw.add_argument("--layer", type=int, default=0, help="which one is drawn")
    draw.add_argument("--ranks", type=int, default=64, help="ranks that share the experts")
    draw.add_argument("--slots", type=int, default=448, help="of all ranks together, a layer")
    draw.add_argument("--loads", type=Path, help=LOADS_HELP)

    live = commands.add_parser("demo", help="4 gloo processes rearrange a toy MoE while it runs")
    live.set_defaults(run=_demo)
    live.add_argument("--steps", type=int, default=120, help="steps of the toy model")
    live.add_argument(
        "--elastic",
        action="store_true",
        help="one process joins, one is killed, one leaves; --steps between two of these",
    )
    return parser


def _demo(args: argparse.Namespace) -> int:
    if args.elastic:
        from deepinfer_eplb.bench.elastic_demo import run_elastic

        return run_elastic(args.steps)
    from deepinfer_eplb.bench.demo import run_demo

    return run_demo(args.steps)


def _plan(args: argparse.Namespace) -> int:
    loads = read_loads(args.loads)
    made = plan(
        loads,
        args.ranks,
        args.slots,
        None if args.old is None else read_placement(args.old),
        old_gpus=args.old_ranks,
        num_groups=args.groups,
        num_nodes=args.nodes,
        objective="totals" if args.totals else "steps",
    )
    write_plan(args.output, made, loads.shape[2], args.first_moe_layer)
    before = "" if made.old_B is None else f" (the old placement: {made.old_B:.4f})"
    W, L, E = loads.shape
    print(f"{args.output}: {L} layers x {E} experts on {args.ranks} ranks, {args.slots} slots")
    print(
        f"from {W} steps in {made.seconds:.2f} s; busiest over mean rank {made.predicted_B:.4f} on "
        f"steps held back{before}; {made.moved:.1%} of the slots come from another rank"
    )
    return 0


def _bench(args: argparse.Namespace) -> int:
    recorded: Path | None = args.loads
    loads = None if recorded is None else read_loads(recorded)
    layers, experts = (args.layers, args.experts) if loads is None else loads.shape[1:]
    case = Case(layers, experts, args.ranks, args.slots)
    print(f"{case}; compiled kernels: {'yes' if compiled() else 'no'}")
    rows: list[Row] = []
    if recorded is None or loads is None:
        print(
            "B on unseen counts, sys = B - 1 on unseen expectations (bound 0), excess = B - floor"
        )
        print(HEAD)
        for kind in args.kinds:
            for seed in args.seeds:
                rows += _printed(compare(kind, seed, case, args.repeats))
    else:
        print("B on the last third of the steps, excess = B - floor, ratio of excesses; no")
        print("expectations are known of recorded loads, so there is no sys")
        print(HEAD)
        rows += _printed(compare_recorded(recorded.stem, loads, case, args.repeats))
    if args.json:
        text = json.dumps([row.as_dict() for row in rows], indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _printed(rows: list[Row]) -> list[Row]:
    print("\n".join(row.line() for row in rows), flush=True)
    return rows


def _draw(args: argparse.Namespace) -> int:
    if args.loads is not None:
        loads, source = read_loads(args.loads), args.loads.name
    else:
        loads, source = generate(args.kind, args.seed).counts, f"{args.kind}, seed {args.seed}"
    L, E = loads.shape[1:]
    if not 0 <= args.layer < L:
        raise LoadError(f"--layer wants 0..{L - 1}, got {args.layer}")
    half = max(1, loads.shape[0] // 2)
    window, unseen = loads[:half], loads[half:] if loads.shape[0] > 1 else loads
    before, after = (
        initial_placement(L, E, args.slots),
        plan(window, args.ranks, args.slots).phy2log,
    )
    panels = [_relative(unseen, p, args.layer, args.ranks) for p in (before, after)]
    B = [evaluate(unseen, p, args.ranks) for p in (before, after)]
    from deepinfer_eplb.bench.plots import draw_loads

    titles = (f"experts in order: B = {B[0].B:.3f}", f"planned: B = {B[1].B:.3f}")
    draw_loads(
        args.output,
        list(zip(titles, panels, strict=True)),
        f"{source}: mean load of each rank on unseen steps, layer {args.layer}; "
        f"B over all layers, noise floor {B[1].floor:.3f}",
    )
    print(f"{args.output}: B {B[0].B:.3f} -> {B[1].B:.3f} (floor {B[1].floor:.3f})")
    return 0


def _relative(loads: Any, placement: npt.NDArray[np.int32], layer: int, G: int) -> Any:
    part = np.asarray(loads[:, layer : layer + 1], dtype=np.float64)
    shares = rank_shares(placement[layer : layer + 1], part.shape[2], G)
    mean = rank_loads(part, shares)[0].mean(axis=0)
    return mean / max(float(mean.mean()), 1e-300)


if __name__ == "__main__":
    sys.exit(main())
