"""Compiling the C++ forms. Standard library only: it runs while the package is being installed.

One shared library per instruction set level; the loader picks the best one the machine has. The
sources' hash is compiled in, so a library left over from other sources is recognised.

    python -m deepinfer_kernels.native.build FOLDER
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
SOURCES = PACKAGE / "native" / "src"
LIBRARY_FOLDER = "deepinfer_kernels_libs"
"""Folder of the libraries in site-packages: an editable install leaves the source tree alone."""

FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-pthread",
    "-Wno-psabi",
)
_V3 = ("-mavx", "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt")
_V4 = ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"v4": (*_V3, *_V4, "-mprefer-vector-width=512"), "v3": _V3, "base": ()},
}
"""Compiler flags of each level, best first. Single features, which older compilers know too, and
not ``-march=x86-64-v4``. v3 is AVX2 with FMA, v4 AVX-512."""
STATIC_RUNTIME = ("-static-libstdc++", "-static-libgcc")
"""Nothing but the C library is then needed at run time."""
UNITS = 3
"""Translation units of one level; each includes the exports of a share of the operators."""
COMPILE_SECONDS = 300


@dataclass(frozen=True)
class Built:
    """What a build left: library files by level, and why each other level is missing."""

    files: dict[str, Path]
    failures: dict[str, str]
    tag: str


def levels() -> dict[str, tuple[str, ...]]:
    """The levels built on this machine type."""
    return LEVELS.get(platform.machine(), {"base": ()})


def library_name(level: str) -> str:
    """File name of the library of one level."""
    return f"_kernels_{level}.so"


def exports() -> list[Path]:
    """The C++ file of every operator that has one."""
    return sorted((PACKAGE / "ops").glob("*/native.cpp"))


def source_hash() -> str:
    """SHA-256 over the names and contents of the C++ sources."""
    digest = hashlib.sha256()
    for path in (*sorted(SOURCES.glob("*.h")), SOURCES / "library.cpp", *exports()):
        name = path.relative_to(PACKAGE).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def find_compiler() -> str | None:
    """``$CXX``, else the first of c++, g++, clang++ on the path."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def platform_tag(files: list[Path], *, self_contained: bool) -> str:
    """The wheel tag of these libraries.

    Libraries that need nothing but the C library run wherever it is new enough for the symbols
    they name: that is what a manylinux tag says. Others are for this system alone.
    """
    machine = platform.machine()
    found = {int(v) for f in files for v in re.findall(rb"GLIBC_2\.(\d+)", f.read_bytes())}
    if self_contained and found and sys.platform == "linux":
        return f"manylinux_2_{max(17, *found)}_{machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def build(folder: Path) -> Built:
    """Compile every level into ``folder``. A level that fails leaves its reason and no file."""
    compiler = find_compiler()
    if compiler is None:
        reason = "no C++ compiler found (looked for $CXX, c++, g++, clang++)"
        return Built({}, dict.fromkeys(levels(), reason), platform_tag([], self_contained=False))
    jobs = max(1, int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
    files: dict[str, Path] = {}
    failures: dict[str, str] = {}
    self_contained = True
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        units = _units(Path(scratch))
        # All levels are begun at once, so that no core waits for a level's last unit.
        begun = {
            level: [
                pool.submit(_run, compiler, *FLAGS, *flags, f"-I{SOURCES}", "-c", str(unit),
                            "-o", str(unit.with_suffix(f".{level}.o")))
                for unit in units
            ]
            for level, flags in levels().items()
        }  # fmt: skip
        for level, compiling in begun.items():
            objects = [unit.with_suffix(f".{level}.o") for unit in units]
            failure = next((reason for job in compiling if (reason := job.result())), None)
            target = folder / library_name(level)
            partial = folder / f"{target.name}.{os.getpid()}.tmp"
            link = (compiler, *FLAGS, "-shared", *map(str, objects))
            if failure is None and _run(*link, *STATIC_RUNTIME, "-o", str(partial)) is not None:
                self_contained = False
                failure = _run(*link, "-o", str(partial))
            if failure is None:
                os.replace(partial, target)
                files[level] = target
            else:
                partial.unlink(missing_ok=True)
                failures[level] = failure
    tag = platform_tag(list(files.values()), self_contained=self_contained)
    return Built(files, failures, tag)


def _units(scratch: Path) -> list[Path]:
    """Translation units: the library's own, and the operators dealt out by size."""
    shares: list[list[Path]] = [[] for _ in range(UNITS)]
    for i, path in enumerate(exports()):
        shares[i % UNITS].append(path)
    shares[0].append(SOURCES / "library.cpp")
    units: list[Path] = []
    for i, share in enumerate(shares):
        unit = scratch / f"unit{i}.cpp"
        lines = [f'#define DI_SOURCE_HASH "{source_hash()}"', *(f'#include "{p}"' for p in share)]
        unit.write_text("\n".join(lines) + "\n", encoding="utf-8")
        units.append(unit)
    return units


def _run(*command: str) -> str | None:
    """None, or the first line that says why it failed."""
    try:
        done = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, timeout=COMPILE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} took more than {COMPILE_SECONDS} s"
    except OSError as error:
        return f"{command[0]}: {error}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    reason = next((line for line in lines if "error" in line), lines[0] if lines else "")
    return f"{command[0]} failed: {reason or done.returncode}"


def main() -> int:
    """Build into the folder named on the command line."""
    if len(sys.argv) != 2:
        print("usage: python -m deepinfer_kernels.native.build FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    built = build(folder)
    for level, path in built.files.items():
        print(f"{level}: {path}")
    for level, reason in built.failures.items():
        print(f"{level}: not built: {reason}", file=sys.stderr)
    return 0 if built.files else 1


if __name__ == "__main__":
    sys.exit(main())
