"""Compiles the C++ forms into the wheel (or the source tree, for an editable install).

Without a C++ compiler the package installs all the same and uses its torch forms;
``deepinfer-kernels doctor`` says so.
"""

import importlib.util
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
        spec.loader.exec_module(native)
        failure = native.build()
        if failure is not None:
            self.app.display_warning(f"deepinfer-kernels: C++ forms not built: {failure}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{native.platform_tag()}"
