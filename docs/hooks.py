"""What the package pages link to: their READMEs are shown as they are, so the files beside a
README that it links to become files beside the page.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

PACKAGES = Path(__file__).parent.parent / "packages"
LINK = re.compile(r"\]\(([\w./-]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the relative link targets of every package's README."""
    for readme in sorted(PACKAGES.glob("*/README.md")):
        package = readme.parent
        for target in sorted(set(LINK.findall(readme.read_text(encoding="utf-8")))):
            path = (package / target).resolve()
            if path.is_file() and path.is_relative_to(package):
                uri = f"packages/{package.name}/{target}"
                files.append(
                    File.generated(
                        config,
                        uri,
                        abs_src_path=str(path),
                        inclusion=InclusionLevel.NOT_IN_NAV,
                    )
                )
    return files
