"""Compiles the routines of `base/native` into the wheel, or the source tree of an editable install.

Without a C compiler or Python's headers the package installs all the same, in pure Python;
``stats()["native"]`` says so.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "deepinfer_kvtier/base/native"
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILE_SECONDS = 300


def source_checksum(native: Path) -> str:
    """What the package will compare, without importing it and what it needs."""
    spec = importlib.util.spec_from_file_location("_native", native / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.source_checksum())


def find_compiler() -> str | None:
    """``$CC``, else the first of cc, gcc, clang on the path."""
    chosen = os.environ.get("CC")
    names = [chosen] if chosen else ["cc", "gcc", "clang"]
    return next((found for name in names if (found := shutil.which(name))), None)


def build(
    native: Path, folder: Path, library: str, extra_flags: tuple[str, ...] = ()
) -> str | None:
    """Compile the sources of ``native`` into ``folder``; None, or one line saying why not."""
    compiler = find_compiler()
    if compiler is None:
        return "no C compiler found (looked for $CC, cc, gcc, clang)"
    headers = sysconfig.get_path("include")
    if not (Path(headers) / "Python.h").exists():
        return f"no Python headers in {headers}"
    partial = folder / f"_routines.{os.getpid()}.tmp"
    command = [compiler, *FLAGS, *extra_flags, f'-DSOURCE_CHECKSUM="{source_checksum(native)}"']
    command += [f"-I{headers}", *map(str, sorted((native / "src").glob("*.c")))]
    command += ["-o", str(partial)]
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
    os.replace(partial, folder / library)
    return None


class NativeBuildHook(BuildHookInterface):
    """Adds the library where it can be compiled."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        native = Path(self.root) / "src" / PACKAGE
        # A library in the source tree would also get into wheels for other Python versions.
        self.folder = tempfile.TemporaryDirectory()
        folder = native if version == "editable" else Path(self.folder.name)
        library = f"_routines{sysconfig.get_config_var('EXT_SUFFIX')}"
        failure = build(native, folder, library)
        if failure is not None:
            self.app.display_warning(f"deepinfer-kvtier: installing in pure Python: {failure}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version != "editable":
            build_data["force_include"][str(folder / library)] = f"{PACKAGE}/{library}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.folder.cleanup()
