"""What the site takes from elsewhere in the repository.

The packages' own pages stand in the site at the paths they have in the repository, so that every
link between them works in both places; an API page a package is made from its sources; charts are
drawn from the results that the packages keep.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parent))

import charts

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "recipe", "kvtier", "dspark", "eplb", "kernels", "search_fetch")
ROOT_PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
LONG_NAME = re.compile(r"<code>([^<\s]{24,})</code>")
JOINT = re.compile(r"(::|[/_.,=-])(?=\w)")
LINK = re.compile(r"\]\(([\w./-]+)\)")
KERNELS = ("errors", "formats", "ops", "registry", "settings", "testing")
TESTING = ("kvtier", "dspark", "engine")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of packages, what they link to, the API pages and the charts."""
    shown = {name: ROOT / name for name in ROOT_PAGES}
    for package in PACKAGES:
        folder = ROOT / "packages" / package
        pages = [*folder.glob("*.md"), *folder.glob("docs/*.md")]
        shown |= {str(page.relative_to(ROOT)): page for page in pages}
        api = File.generated(config, f"packages/{package}/api.md", content=_api(package))
        files.append(api)
    linked: dict[str, Path] = {}
    own = [(ROOT, page) for page in (ROOT / "docs" / "pages").glob("*.md")]
    for folder, page in [*((page.parent, page) for page in shown.values()), *own]:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            path = (folder / target).resolve()
            if path.is_file() and path.is_relative_to(ROOT):
                linked.setdefault(str(path.relative_to(ROOT)), path)
    for uri, path in {**linked, **shown}.items():
        if files.get_file_from_path(uri) is None:
            files.append(
                File.generated(
                    config,
                    uri,
                    abs_src_path=str(path),
                    inclusion=InclusionLevel.INCLUDED
                    if uri in shown
                    else InclusionLevel.NOT_IN_NAV,
                )
            )
    for name, drawn in charts.drawn(ROOT).items():
        files.append(File.generated(config, f"img/{name}.svg", content=drawn))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Links to files that are no pages of the site lead nowhere there: they become plain text."""
    uri = Path(page.file.src_uri)  # type: ignore[attr-defined]  # mkdocs passes a Page

    def kept(match: re.Match[str]) -> str:
        target = (uri.parent / match.group(2)).as_posix()
        known = files.get_file_from_path(str(_normal(target)))
        return match.group(0) if known is not None else match.group(1)

    return re.sub(r"(?<!!)\[([^\]]+)\]\(((?!https?:|#|mailto:)[^)#\s]+)\)", kept, markdown)


def on_page_content(html: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Long names may be broken where they are joined.

    Otherwise they are broken anywhere on a phone, and in a table a test's name takes a column of
    its own length, which leaves the text beside it a word a line.
    """

    def broken(name: re.Match[str]) -> str:
        return "<code>" + JOINT.sub(r"\1<wbr>", name.group(1)) + "</code>"

    return LONG_NAME.sub(broken, html)


def _normal(path: str) -> Path:
    parts: list[str] = []
    for part in Path(path).parts:
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return Path(*parts)


def _operators(module: str) -> str:
    """Each operator: its function bears the name of the module that it is defined below."""
    folder = ROOT / "packages" / "kernels" / "src" / Path(*module.split("."))
    options = "    options: {show_root_heading: true, show_root_full_path: false, heading_level: 3}"
    names = sorted(path.parent.name for path in folder.glob("*/spec.py"))
    return "".join(f"\n::: {module}.{name}.spec.{name}\n{options}\n" for name in names)


def _api(package: str) -> str:
    """The API page: what the package exports, in the order of its modules' sources."""
    name = f"deepinfer_{package}"
    title = package.replace("_", " ")
    text = f"# {title}: API\n\nImport from `{name}`. "
    if package == "kernels":
        modules = [f"{name}.{part}" for part in KERNELS]
        text = f"# {title}: API\n\n"
    else:
        modules = [name]
    for module in modules:
        heading = f"## {module}\n\n" if len(modules) > 1 else ""
        text += f"\n\n{heading}::: {module}\n"
        if module == "deepinfer_kernels.ops":
            text += _operators(module)
    if package in TESTING:
        text += f"\n## {name}.testing\n\nFor tests of what others build on it.\n\n"
        text += f"::: {name}.testing\n    options:\n      heading_level: 3\n"
    return text
