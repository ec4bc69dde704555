"""`deepinfer-dspark`: check a speculative decoder, simulate scheduled verification, draw it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer_dspark import __version__
from deepinfer_dspark.check import check_budget, check_completions, check_verify
from deepinfer_dspark.check.completions import http_post
from deepinfer_dspark.errors import DsparkError, TableError
from deepinfer_dspark.sim import simulate_group
from deepinfer_dspark.sim.plots import Line, draw_lines
from deepinfer_dspark.sim.published import Curve, gain_curves, held_back, rocm_curve, sensitivity

MAX_JSON_BYTES = 1 << 20
TITLES = {
    "gain": "Scheduled against full verification, five drafts (simulated)",
    "rocm": "Scheduled against full verification, seven drafts (simulated)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    parser = argparse.ArgumentParser(prog="deepinfer-dspark", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    sim = commands.add_parser("sim", help="gain of scheduled over full verification, by batch size")
    sim.add_argument(
        "--requests", type=int, nargs="+", default=[16, 24, 32, 48, 64, 96], help="batch sizes"
    )
    sim.add_argument("--steps", type=int, default=400, help="rounds a run; each point is 4 runs")
    sim.add_argument("--gamma", type=int, default=5, help="drafts a request and round")
    sim.add_argument("--rocm", action="store_true", help="also the second published curve")
    sim.add_argument("--groups", action="store_true", help="also group-wide against own budgets")
    sim.add_argument("--noise", action="store_true", help="also with worse confidences")
    sim.add_argument("--held-back", action="store_true", help="also points that no fit has used")
    sim.add_argument("--json", type=Path, help="write the rows here")
    plot = commands.add_parser("plot", help="draw the rows of `sim --json` (svg, png or pdf)")
    plot.add_argument("rows", type=Path, help="what `sim --json` wrote")
    plot.add_argument("output", type=Path, help="the picture; its suffix decides the format")
    plot.add_argument("--curve", choices=sorted(TITLES), default="gain")
    _check_arguments(commands)
    args = parser.parse_args(argv)
    try:
        if args.command == "check":
            return _check(args)
        return _sim(args) if args.command == "sim" else _plot(args)
    except (DsparkError, OSError, ImportError) as e:
        print(f"deepinfer-dspark: {e}", file=sys.stderr)
        return 1


def _check_arguments(commands: Any) -> None:
    check = commands.add_parser("check", help="does an engine keep the target's distribution?")
    kinds = check.add_subparsers(dest="kind", required=True)
    verify = kinds.add_parser("verify", help="a function verify(p, q, drafts, uniform) -> tokens")
    verify.add_argument("function", help="MODULE:NAME, looked for in this folder too")
    verify.add_argument("--draws", type=int, help="count so many rounds instead of enumerating")
    budget = kinds.add_parser("budget", help="a function lengths(older, conf) -> int [R]")
    budget.add_argument("function", help="MODULE:NAME, looked for in this folder too")
    for one, vocab, cases in ((verify, 3, 4), (budget, 2, 12)):
        one.add_argument("--vocab", type=int, default=vocab, help="tokens of the made-up models")
        one.add_argument("--gamma", type=int, default=2, help="drafts a request")
        one.add_argument("--cases", type=int, default=cases, help="made-up models to try")
        one.add_argument("--seed", type=int, default=0, help="what they are drawn from")
    http = kinds.add_parser("http", help="an OpenAI-style completions address with logprobs")
    http.add_argument("url", help="for example http://127.0.0.1:8000/v1/completions")
    http.add_argument("--model", required=True, help="its name at that server")
    http.add_argument("--prompt", default="Once upon a time", help="what is completed")
    http.add_argument("--requests", type=int, default=2000, help="completions to draw")
    http.add_argument("--tokens", type=int, default=3, help="length of each")
    http.add_argument("--top", type=int, default=5, help="log-probabilities a token")
    http.add_argument("--key-env", metavar="NAME", help="environment variable with the API key")


def _check(args: argparse.Namespace) -> int:
    """0 = kept, 1 = not kept, 2 = could not be checked."""
    try:
        if args.kind == "http":
            key = os.environ.get(args.key_env) if args.key_env else None
            report = check_completions(
                http_post(args.url, key), model=args.model, prompt=args.prompt,
                requests=args.requests, tokens=args.tokens, top=args.top,
            )  # fmt: skip
        else:
            function = _named(args.function)
            sizes = {n: getattr(args, n) for n in ("vocab", "gamma", "cases", "seed")}
            if args.kind == "verify":
                report = check_verify(function, draws=args.draws, **sizes)
            else:
                report = check_budget(function, **sizes)
    except DsparkError as e:
        print(f"deepinfer-dspark: {e}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.kept else 1


def _named(name: str) -> Any:
    """The function MODULE:NAME."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise DsparkError(f"want MODULE:NAME, got {name!r}")
    sys.path.insert(0, "")  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise DsparkError(f"cannot load {name}: {e}") from e
    finally:
        sys.path.remove("")
    if not callable(found):
        raise DsparkError(f"{name} is not a function")
    return found


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
    if args.noise:
        print("96 requests with worse confidences: gain, accepted length lost")
        rows["noise"] = {}
        for name, o in sensitivity(steps=args.steps):
            rows["noise"][name] = asdict(o)
            print(f"  {name:16}{o.gain:+7.1%} +- {o.gain_sd:.1%}{o.length_loss:8.1%}")
    if args.held_back:
        print("points that no fit has used: simulated, published")
        rows["held_back"] = []
        for name, value, published in held_back(curves[0].machine, steps=args.steps):
            rows["held_back"].append([name, value, published])
            print(f"  {name:40}{value:8.3f}   {published}")
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
    draw_lines(args.output, lines, TITLES[args.curve], "requests", "throughput gain, percent")
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
