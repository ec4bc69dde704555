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
from deepinfer_dspark.sim import simulate_group
from deepinfer_dspark.sim.published import Curve, gain_curves, rocm_curve
from deepinfer_dspark.sim.svg import Line, chart

MAX_JSON_BYTES = 1 << 20
TITLES = {
    "gain": "Scheduled against full verification, five drafts (simulated)",
    "rocm": "Scheduled against full verification, seven drafts (simulated)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    parser = argparse.ArgumentParser(prog="deepinfer-dspark", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sim = commands.add_parser("sim", help="gain of scheduled over full verification, by batch size")
    sim.add_argument("--requests", type=int, nargs="+", default=[16, 24, 32, 48, 64, 96])
    sim.add_argument("--steps", type=int, default=400, help="rounds a run; each point is 4 runs")
    sim.add_argument("--gamma", type=int, default=5)
    sim.add_argument("--rocm", action="store_true", help="also the second published curve")
    sim.add_argument("--groups", action="store_true", help="also group-wide against own budgets")
    sim.add_argument("--json", type=Path, help="write the rows here")
    plot = commands.add_parser("plot", help="draw the rows of `sim --json` as SVG")
    plot.add_argument("rows", type=Path)
    plot.add_argument("output", type=Path)
    plot.add_argument("--curve", choices=sorted(TITLES), default="gain")
    args = parser.parse_args(argv)
    try:
        return _sim(args) if args.command == "sim" else _plot(args)
    except (DsparkError, OSError) as e:
        print(f"deepinfer-dspark: {e}", file=sys.stderr)
        return 1


def _sim(args: argparse.Namespace) -> int:
    if min(args.requests) < 1 or args.steps < 1 or args.gamma < 1:
        raise DsparkError("sim wants positive --requests, --steps and --gamma")
    curves = [*gain_curves(args.requests, gamma=args.gamma, steps=args.steps)]
    if args.rocm:
        curves.append(rocm_curve(steps=args.steps))
    for curve in curves:
        print_curve(curve)
    rows: dict[str, Any] = {"gamma": args.gamma, "steps": args.steps}
    rows["curves"] = {curve.name: asdict(curve) for curve in curves}
    if args.groups:
        print("16 ranks of 64 requests +- spread, step time set by the fullest rank (assumption)")
        rows["groups"] = []
        for spread in (0.0, 6.0, 12.0):
            g = simulate_group(spread=spread, steps=max(args.steps // 10, 30))
            rows["groups"].append(asdict(g))
            print(f"  spread {spread:4.0f}: own budgets {g.independent:6.1%}, group {g.group:6.1%}")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def print_curve(curve: Curve) -> None:
    """One fitted machine and its predictions, a line for each number of requests."""
    m, published = curve.machine, dict(curve.published)
    fitted = " and ".join(f"{r} ({g:+.1%})" for r, g in curve.fitted)
    print(
        f"{curve.name}: machine fitted on {fitted} requests only: {m.per_token_ms:.4f} ms a token, "
        f"ragged overhead {m.ragged_overhead:.1%}"
    )
    print(f"{'R':>5}{'gain':>8}{'+-':>6}{'published':>11}{'rows saved':>12}{'length lost':>13}"
          f"{'length':>10}")  # fmt: skip
    for o in curve.outcomes:
        known = f"{published[o.requests]:+.1%}" if o.requests in published else ""
        print(
            f"{o.requests:5d}{o.gain:+8.1%}{o.gain_sd:6.1%}{known:>11}{1 - o.rows:12.1%}"
            f"{o.length_loss:13.1%}{o.length_fixed:8.2f} ->{o.length_dynamic:5.2f}"
        )


def _plot(args: argparse.Namespace) -> int:
    if args.rows.stat().st_size > MAX_JSON_BYTES:
        raise TableError(f"{args.rows} is larger than {MAX_JSON_BYTES} bytes")
    names = ("default", "separating") if args.curve == "gain" else ("rocm",)
    try:
        curves = json.loads(args.rows.read_text(encoding="utf-8"))["curves"]
        lines = [
            Line(
                f"{name} model",
                [(o["requests"], 100 * o["gain"]) for o in curves[name]["outcomes"]],
            )
            for name in names
        ]
        dots = [(x, 100 * y) for x, y in curves[names[0]]["published"]]
        lines.append(Line("published", dots, dots=True))
    except (ValueError, KeyError, TypeError) as e:
        raise TableError(f"{args.rows} does not hold rows of `sim --json` ({e!r})") from e
    args.output.write_text(
        chart(lines, TITLES[args.curve], "requests", "throughput gain, percent"), encoding="utf-8"
    )
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
