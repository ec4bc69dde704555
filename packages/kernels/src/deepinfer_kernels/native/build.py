"""Compiling the C++ forms. Standard library only: it runs while the package is being installed.

One shared library per instruction set level; the loader picks the best one the machine has. The
sources' hash is compiled in, so a library left over from other sources is recognised.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-Wno-psabi",
)
LEVELS = {
    "x86_64": {
        "v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
        "v3": ("-march=x86-64-v3",),
        "base": (),
    }
}
"""Compiler flags of each level, best first. v3 is AVX2 with FMA, v4 AVX-512."""
OPENMP = "-fopenmp"
"""Used where the compiler has it: the threads are then torch's own."""
COMPILE_SECONDS = 300


def levels() -> dict[str, tuple[str, ...]]:
    """The levels built on this machine type."""
    return LEVELS.get(platform.machine(), {"base": ()})


def platform_tag() -> str:
    """The wheel tag of what was built; it links the C, C++ and OpenMP runtimes and nothing else."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def library_path(level: str, folder: Path = HERE) -> Path:
    """Where the library of one level lies."""
    return folder / f"_kernels_{level}.so"


def source_hash() -> str:
    """SHA-256 over the names and contents of the C++ sources."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in {".h", ".cpp"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def find_compiler() -> str | None:
    """``$CXX``, else the first of c++, g++, clang++ on the path."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(folder: Path = HERE) -> str | None:
    """Compile every level into ``folder``; None on success, else one line saying why not."""
    compiler = find_compiler()
    if compiler is None:
        return "no C++ compiler found (looked for $CXX, c++, g++, clang++)"
    flags = dict(levels())
    if _compile(compiler, {name: (*own, OPENMP) for name, own in flags.items()}, folder) is None:
        return None
    return _compile(compiler, flags, folder)


def _compile(compiler: str, wanted: dict[str, tuple[str, ...]], folder: Path) -> str | None:
    """Compile all levels side by side; None, or why one of them failed."""
    digest = source_hash()
    jobs: list[tuple[Path, Path, subprocess.Popen[str]]] = []
    for level, flags in wanted.items():
        target = library_path(level, folder)
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        command = [compiler, *FLAGS, *flags, f'-DDI_SOURCE_HASH="{digest}"']
        command += [str(SOURCES / "kernels.cpp"), "-o", str(partial)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        jobs.append((target, partial, process))
    failure: str | None = None
    for target, partial, process in jobs:
        try:
            _, errors = process.communicate(timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
        if process.returncode == 0:
            os.replace(partial, target)
        else:
            partial.unlink(missing_ok=True)
            reason = errors.strip().splitlines()
            failure = f"{compiler} failed: {reason[0] if reason else process.returncode}"
    return failure
