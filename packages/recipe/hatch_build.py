"""Compiles the routines of `native` into the wheel (or the source tree, for an editable install).

Without a C compiler or Python's headers the package installs all the same, in pure Python;
``deepinfer-recipe --version`` says so.
"""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "deepinfer_recipe/native"


class NativeBuildHook(BuildHookInterface):
    """Runs `deepinfer_recipe.native.build` without importing the package and what it needs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root) / "src" / PACKAGE
        spec = importlib.util.spec_from_file_location("_native_build", source / "build.py")
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        # A library in the source tree would also get into wheels for other Python versions.
        self.folder = tempfile.TemporaryDirectory()
        folder = source if version == "editable" else Path(self.folder.name)
        failure = native.build(folder)
        if failure is not None:
            self.app.display_warning(f"deepinfer-recipe: installing in pure Python: {failure}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version != "editable":
            library = native.library_name()
            build_data["force_include"][str(folder / library)] = f"{PACKAGE}/{library}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.folder.cleanup()
