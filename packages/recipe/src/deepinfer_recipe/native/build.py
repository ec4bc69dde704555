"""Compiling the extension module. Standard library only: it runs while the package is installed."""

from __future__ import annotations

import zlib
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILE_SECONDS = 300


def source_checksum() -> str:
    """CRC-32 over the C sources: tells a library that was left over from other sources."""
    value = 0
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in {".c", ".h"}:
            value = zlib.crc32(path.read_bytes(), value)
    return f"{value:08x}"


def library_name() -> str:
    """File name of the module for the running interpreter."""
    import sysconfig

    return f"_routines{sysconfig.get_config_var('EXT_SUFFIX')}"


def find_compiler() -> str | None:
    """``$CC``, else the first of cc, gcc, clang on the path."""
    import os
    import shutil

    chosen = os.environ.get("CC")
    names = [chosen] if chosen else ["cc", "gcc", "clang"]
    return next((found for name in names if (found := shutil.which(name))), None)


def build(folder: Path, extra_flags: tuple[str, ...] = ()) -> str | None:
    """Compile the module into ``folder``; None on success, else one line saying why not."""
    import os
    import subprocess
    import sysconfig

    compiler = find_compiler()
    if compiler is None:
        return "no C compiler found (looked for $CC, cc, gcc, clang)"
    headers = sysconfig.get_path("include")
    if not (Path(headers) / "Python.h").exists():
        return f"no Python headers in {headers}"
    partial = folder / f"_routines.{os.getpid()}.tmp"
    command = [compiler, *FLAGS, *extra_flags, f'-DSOURCE_CHECKSUM="{source_checksum()}"']
    command += [f"-I{headers}", *map(str, sorted(SOURCES.glob("*.c"))), "-o", str(partial)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} failed: {error}"
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        reason = done.stderr.strip().splitlines()
        return f"{compiler} failed: {reason[0] if reason else done.returncode}"
    os.replace(partial, folder / library_name())
    return None
