"""``deepinfer-kernels``: doctor, verify, bench, aot. Torch loads only once a command runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from deepinfer_kernels import __version__
from deepinfer_kernels.errors import KernelsError

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a whole number from 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError(f"wants seconds above 0 and up to 60, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="deepinfer-kernels", description="Operators of DeepSeek-V4.1 models.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    doctor = commands.add_parser("doctor", help="which back end each operator gets, and why")
    doctor.add_argument("--device", default=None, help="device type; default: every one present")
    doctor.add_argument("--json", action="store_true", help="machine-readable output")

    verify = commands.add_parser("verify", help="fuzz every back end against the reference")
    verify.add_argument("--device", default="cpu", help="device type (default cpu)")
    verify.add_argument("--op", action="append", help="only this operator; may be repeated")
    verify.add_argument("--cases", type=_count, default=20, help="cases an operator and dtype")
    verify.add_argument("--seed", type=int, default=0, help="first seed")
    verify.add_argument("--backend", default=None, help="only this back end")
    verify.add_argument("--out", default=None, help="also write the results as JSON")

    bench = commands.add_parser("bench", help="time every back end against measured ceilings")
    bench.add_argument("--device", default="cpu", help="device type (default cpu)")
    bench.add_argument("--op", action="append", help="only this operator; may be repeated")
    bench.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    bench.add_argument("--seconds", type=_seconds, default=0.1, help="time a row (default 0.1)")
    bench.add_argument("--large", action="store_true", help="also the shapes of the full model")
    bench.add_argument("--out", default=None, help="also write the results as JSON")

    aot = commands.add_parser("aot", help="compile the Triton forms for targets, without a device")
    aot.add_argument(
        "--targets",
        default="sm80,sm90a,sm100a,sm120a",
        help="comma separated; or ascend950, in an environment of its own",
    )
    aot.add_argument("--op", action="append", help="only this operator; may be repeated")
    aot.add_argument("--variants", type=_count, default=2, help="compilations a kernel and target")
    aot.add_argument("--against", default=None, help="a table of earlier results: new spills fail")
    aot.add_argument("--out", default=None, help="also write the results as JSON")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.command == "doctor":
        from deepinfer_kernels import doctor

        return doctor.run(options.device, as_json=options.json)
    if options.command == "verify":
        from deepinfer_kernels import verify

        return verify.run(
            options.device,
            options.op,
            options.cases,
            options.seed,
            options.backend,
            options.out,
        )
    if options.command == "aot":
        from deepinfer_kernels.triton_support import compare_aot

        targets = options.targets.split(",")
        return compare_aot.run(options.op, targets, options.variants, options.against, options.out)
    from deepinfer_kernels import bench

    return bench.run(
        options.device, options.op, options.dtype, options.seconds, options.large, options.out
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 fine, 1 the answer is bad, 2 the question was."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except KernelsError as error:
        print(f"deepinfer-kernels: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the last flush, at exit
        return 1
    except OSError as error:
        print(f"deepinfer-kernels: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
