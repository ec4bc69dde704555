"""`deepinfer-dspark`: simulate scheduled verification and draw the result."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer_dspark.errors import DsparkError, TableError
from deepinfer_dspark.sim import (
    SEPARATING,
    Acceptance,
    Outcome,
    fit_machine,
    simulate,
    simulate_group,
)
from deepinfer_dspark.svg import Line, chart

PUBLISHED = [(16, -1.5), (96, 11.0)]
MAX_JSON_BYTES = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    parser = argparse.ArgumentParser(prog="deepinfer-dspark", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sim = commands.add_parser("sim", help="gain of scheduled over full verification, by batch size")
    sim.add_argument("--requests", type=int, nargs="+", default=[16, 24, 32, 48, 64, 96])
    sim.add_argument("--steps", type=int, default=1500)
    sim.add_argument("--seed", type=int, default=0)
    sim.add_argument("--gamma", type=int, default=5)
    sim.add_argument("--groups", action="store_true", help="also group-wide against own budgets")
    sim.add_argument("--json", type=Path, help="write the rows here")
    plot = commands.add_parser("plot", help="draw the rows of `sim --json` as SVG")
    plot.add_argument("rows", type=Path)
    plot.add_argument("output", type=Path)
    args = parser.parse_args(argv)
    try:
        return _sim(args) if args.command == "sim" else _plot(args)
    except (DsparkError, OSError) as e:
        print(f"deepinfer-dspark: {e}", file=sys.stderr)
        return 1


def _sim(args: argparse.Namespace) -> int:
    if min(args.requests) < 1 or args.steps < 1 or args.gamma < 1:
        raise DsparkError("sim wants positive --requests, --steps and --gamma")
    low, high = ((r, g / 100.0) for r, g in PUBLISHED)
    rows: dict[str, Any] = {"published": PUBLISHED, "gamma": args.gamma, "steps": args.steps}
    for name, model in (("default", Acceptance()), ("separating", SEPARATING)):
        machine = fit_machine(
            low, high, gamma=args.gamma, model=model, steps=max(args.steps // 4, 50), seed=args.seed
        )
        print(
            f"{name} confidence model; machine fitted on {PUBLISHED[0][0]} and {PUBLISHED[1][0]} "
            f"requests only: {machine.per_token_ms:.4f} ms a token, ragged overhead "
            f"{machine.ragged_overhead:.1%}"
        )
        print(f"{'R':>5}{'gain':>8}{'rows saved':>12}{'length lost':>13}{'length':>16}")
        outcomes: list[Outcome] = []
        for requests in args.requests:
            o = simulate(
                requests,
                gamma=args.gamma,
                machine=machine,
                model=model,
                steps=args.steps,
                seed=args.seed + 1,
            )
            outcomes.append(o)
            lost = 1.0 - o.length_dynamic / o.length_fixed
            print(
                f"{o.requests:5d}{o.gain:8.1%}{1 - o.rows:12.1%}{lost:13.1%}"
                f"{o.length_fixed:8.2f} ->{o.length_dynamic:5.2f}"
            )
        rows[name] = {"machine": asdict(machine), "outcomes": [asdict(o) for o in outcomes]}
    if args.groups:
        print("16 ranks of 64 requests +- spread, step time set by the fullest rank (assumption)")
        rows["groups"] = []
        for spread in (0.0, 6.0, 12.0):
            g = simulate_group(spread=spread, steps=max(args.steps // 10, 30), seed=args.seed)
            rows["groups"].append(asdict(g))
            print(f"  spread {spread:4.0f}: own budgets {g.independent:6.1%}, group {g.group:6.1%}")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _plot(args: argparse.Namespace) -> int:
    if args.rows.stat().st_size > MAX_JSON_BYTES:
        raise TableError(f"{args.rows} is larger than {MAX_JSON_BYTES} bytes")
    try:
        rows = json.loads(args.rows.read_text(encoding="utf-8"))
        lines = [
            Line(
                f"{name} model", [(o["requests"], 100 * o["gain"]) for o in rows[name]["outcomes"]]
            )
            for name in ("default", "separating")
        ]
        lines.append(Line("published, fitted", [(x, y) for x, y in rows["published"]], dots=True))
    except (ValueError, KeyError, TypeError) as e:
        raise TableError(f"{args.rows} does not hold rows of `sim --json` ({e!r})") from e
    title = "Scheduled against full verification (simulated)"
    args.output.write_text(
        chart(lines, title, "requests", "throughput gain, percent"), encoding="utf-8"
    )
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
