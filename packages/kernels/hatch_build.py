"""Compiles the C++ forms into the wheel; the source tree is left as it is.

Without a C++ compiler the package installs all the same and uses its torch forms;
``deepinfer-kernels doctor`` says so.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):
    """Runs `deepinfer_kernels.native.build` without importing the package, which needs torch."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root) / "src/deepinfer_kernels/native/build.py"
        spec = importlib.util.spec_from_file_location("_native_build", source)
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = native  # its dataclass looks its own module up
        spec.loader.exec_module(native)
        self._folder = tempfile.TemporaryDirectory(prefix="deepinfer-kernels-")
        built = native.build(Path(self._folder.name))
        for level, failure in built.failures.items():
            self.app.display_warning(f"deepinfer-kernels: C++ forms, {level}: not built: {failure}")
        if not built.files:
            return
        included = {
            str(path): f"{native.LIBRARY_FOLDER}/{path.name}" for path in built.files.values()
        }
        build_data["force_include"].update(included)
        build_data["force_include_editable"].update(included)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{built.tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._folder.cleanup()
