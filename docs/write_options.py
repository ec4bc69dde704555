"""Write the pages of options from the commands themselves: `python docs/write_options.py`.

docs/pages/using/options.md has the settings, and docs/pages/using/commands a page a command. With
`--check` it only says whether they are what the commands are now. Needs every package.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import typer
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pages" / "using"
GENERATED = "Generated from the commands; a check of the `docs` session keeps it true.\n"
INTRO = f"""# Every setting and variable

{GENERATED}
The options of each command have a page of their own: COMMANDS.

Settings of the server are read in this order, and the last one wins: default, `deepinfer.toml`
(or `--config FILE`), environment, flag. A name that nobody knows is an error that names the
nearest one.
"""
TYPER = {
    "deepinfer": "deepinfer_engine.cli.main",
    "search-fetch": "deepinfer_search_fetch.cli",
    "kvtier": "deepinfer_kvtier.ops.cli",
}
ARGPARSE = {
    "deepinfer-recipe": "deepinfer_recipe.cli",
    "deepinfer-dspark": "deepinfer_dspark.cli",
    "deepinfer-eplb": "deepinfer_eplb.cli",
    "deepinfer-kernels": "deepinfer_kernels.cli",
}
VARIABLES = {
    "DEEPINFER_ADMIN_KEY": "`deepinfer drain`: admin key of that server",
    "DEEPINFER_API_KEY": "`deepinfer chat`, `bench`, `top`, `usage`: key of that server",
    "DEEPINFER_CLUSTER_KEY": "workers and router: their shared key, 64 hexadecimal digits",
    "DEEPINFER_DEBUG": "`deepinfer`: 1 shows tracebacks instead of one line",
    "DEEPINFER_EPLB_VLLM": "1 installs eplb's policy in vLLM's processes",
    "DEEPINFER_KERNELS": "back ends: one for all, or `operator=backend,...`",
    "DEEPINFER_KERNELS_CHECK": "1 checks arguments of operators in every call",
    "DEEPINFER_KERNELS_STRICT": "1 makes a fall-back to a slower back end an error",
    "DEEPINFER_KVTIER_PURE": "1 leaves the compiled part of kvtier out",
    "DEEPINFER_REASONING_KEYS": "keys that seal reasoning of Responses: `id:base64,...`",
    "DEEPINFER_RECIPE_PURE": "1 leaves the compiled part of recipe out",
    "DEEPINFER_SEARCH_FETCH_HOME": "folder of index, cache, keys and ledger",
    "DEEPINFER_SEARCH_FETCH_RENDER_SANDBOX": "`off` gives up the browser's own sandbox",
    "DEEPINFER_SEARCH_FETCH_RENDER_USER": "account that the browser runs as",
    "DEEPINFER_SEARCH_KEY": "key sent to the service of `--search URL`",
    "DEEPINFER_SEARCH_SECRET": "seals search results that clients carry",
    "DEEPINFER_SUPERVISED": "set by the supervisor for its children; not for you",
    "XDG_CACHE_HOME": "where caches and pulled models lie, below `deepinfer/`",
    "XDG_DATA_HOME": "where search-fetch keeps its data, below `deepinfer-search-fetch/`",
    "CC": "C compiler at installation",
    "CXX": "C++ compiler at installation",
    "MAX_JOBS": "compilers at once, at installation of kernels",
    "TRITON_INTERPRET": "1 runs Triton forms in its interpreter, on the CPU",
}
"""What a variable is for. A variable that the sources name and that is not here fails the check."""
NOT_VARIABLES = {"DEEPINFER_", "DEEPINFER_SEARCH_FETCH_"}


class _FoundParserError(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _code(value: object) -> str:
    return f"`{value}`"


def _default(value: Any) -> str:
    """As a reader would write it; empty for what is off or not given."""
    if value in (None, (), [], "", False, argparse.SUPPRESS, PydanticUndefined):
        return ""
    if value is True:
        return "`true`"
    if isinstance(value, tuple | list):
        return _code(",".join(map(str, value)))
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"`{value}` ({value >> 20} MiB)"
    home = str(Path.home())
    return _code(str(value).replace(home, "~"))


def _table(rows: list[tuple[str, str, str]], head: tuple[str, str, str]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(head)} |", "|---|---|---|"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


HEAD = ("option", "default", "meaning")


def _settings() -> dict[str, Any]:
    from deepinfer_engine.settings import Settings

    return dict(Settings.model_fields)


def _click_commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    if any(p.name != "help" for p in command.params):
        yield path, command
    for name, each in inner.items():
        yield from _click_commands(each, f"{path} {name}")


def _click_rows(command: Any, settings: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    for p in command.params:
        if p.name in ("help", "install_completion", "show_completion"):
            continue
        default = p.default
        if callable(default) or "Sentinel" in type(default).__name__:
            default = None
        if p.param_type_name == "argument":
            name = p.metavar or (p.name or "").upper()
            rows.append((_code(name), _default(default), getattr(p, "help", None) or ""))
            continue
        field = settings.get(_setting_of(p))
        if default in (None, (), []) and field is not None:
            default = field.get_default(call_default_factory=True)
            default = None if default is True else default
        meaning = p.help or ""
        if p.envvar:
            meaning += f" Also `{p.envvar}`."
        rows.append((_code(", ".join([*p.opts, *p.secondary_opts])), _default(default), meaning))
    return rows


def _setting_of(parameter: Any) -> str:
    plural = {"allowed_host": "allowed_hosts", "cors_origin": "cors_origins"}
    name = max(parameter.opts, key=len).lstrip("-").replace("-", "_")
    return plural.get(name, name)


def _parser(module: str) -> argparse.ArgumentParser:
    def caught(self: argparse.ArgumentParser, *_: object) -> None:
        raise _FoundParserError(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", caught):
        try:
            import_module(module).main([])
        except _FoundParserError as found:
            return found.parser
    raise RuntimeError(f"{module}.main parses no arguments")


def _parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog, parser
    for group in groups:
        for inner in dict.fromkeys(group.choices.values()):
            yield from _parsers(inner)


def _argparse_rows(parser: argparse.ArgumentParser) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        if isinstance(action, argparse._VersionAction):
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        meaning = action.help or ""
        if action.choices is not None:
            few = [str(choice) for choice in action.choices]
            meaning += f" One of {', '.join(few)}." if len(few) < 12 else ""
        default = action.default
        if isinstance(default, Path) and default.is_absolute():
            default = None
        rows.append((_code(name), _default(default), meaning % {"default": default}))
    return rows


def _variables() -> Iterator[str]:
    """Every environment variable of ours that the sources name."""
    pattern = re.compile(r"(?:DEEPINFER|KVTIER)_[A-Z_]*")
    found: set[str] = set()
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update({node.value} if pattern.fullmatch(node.value) else ())
    yield from sorted(found - NOT_VARIABLES)


def pages() -> dict[str, str]:
    """Path below docs/pages/using -> the whole page."""
    titles = (*TYPER, *ARGPARSE)
    made = {f"commands/{title}.md": _typer_page(title, module) for title, module in TYPER.items()}
    for title, module in ARGPARSE.items():
        made[f"commands/{title}.md"] = _argparse_page(title, module)
    links = ", ".join(f"[`{title}`](commands/{title}.md)" for title in titles)
    parts = [INTRO.replace("COMMANDS", links)]
    rows = [
        (
            f"`{name}`",
            _default(field.get_default(call_default_factory=True)),
            field.description or "",
        )
        for name, field in _settings().items()
    ]
    parts.append("## Settings: `deepinfer.toml`, `DEEPINFER_<NAME>`\n")
    parts.append(
        "`port = 8001` in the file is `DEEPINFER_PORT=8001` in the environment. Lists are written "
        "with commas there.\n"
    )
    parts.append(_table(rows, ("setting", "default", "meaning")))
    named = {*_variables(), *VARIABLES}
    missing = sorted(named - set(VARIABLES))
    if missing:
        raise SystemExit(f"{Path(__file__).name}: say in VARIABLES what {missing} are for")
    parts.append("## Other environment variables\n")
    variables = [(f"`{name}`", VARIABLES[name]) for name in sorted(named)]
    parts.append("| variable | meaning |\n|---|---|\n")
    parts[-1] += "\n".join(f"| {a} | {_cell(b)} |" for a, b in variables) + "\n"
    made["options.md"] = _joined(parts)
    return made


def _joined(parts: list[str]) -> str:
    return "\n".join(part for part in parts if part)


def _typer_page(title: str, module: str) -> str:
    command = typer.main.get_command(import_module(module).app)
    known = _settings() if title == "deepinfer" else {}
    parts = [f"# The command `{title}`\n", GENERATED]
    for path, each in _click_commands(command, title):
        about = (each.help or "").split("\f")[0].strip().split("\n\n")[0]
        parts += [f"## `{path}`\n\n{_cell(about)}\n", _table(_click_rows(each, known), HEAD)]
    if title == "search-fetch":
        parts.append("## Settings\n")
        parts.append(
            "In `config.toml` of the home folder, as `--set NAME=VALUE` before the command, or as "
            "`DEEPINFER_SEARCH_FETCH_<NAME>` with an underscore for the dot.\n"
        )
        parts.append(_table(_fetch_settings(), ("setting", "default", "kind")))
    return _joined(parts)


def _argparse_page(title: str, module: str) -> str:
    parts = [f"# The command `{title}`\n", GENERATED]
    for path, parser in _parsers(_parser(module)):
        name = path.replace(Path(sys.argv[0]).name, title)
        about = (parser.description or "").strip().split("\n\n")[0]
        parts += [f"## `{name}`\n\n{_cell(about)}\n", _table(_argparse_rows(parser), HEAD)]
    return _joined(parts)


def _fetch_settings() -> list[tuple[str, str, str]]:
    from deepinfer_search_fetch.config import Config, Limits

    by_machine = {"extract_workers": "one a core", "search_threads": "cores + 1", "home": ""}
    rows: list[tuple[str, str, str]] = []
    for prefix, model in (("", Config), ("limits.", Limits)):
        for name, field in model.model_fields.items():
            if name == "limits":
                continue
            value = field.get_default(call_default_factory=True)
            shown = by_machine.get(name, _default(value))
            kind = re.sub(r"typing\.|pathlib\.|pydantic\.types\.", "", str(field.annotation))
            kind = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind)
            rows.append((f"`{prefix}{name}`", shown, kind))
    return rows


def main() -> None:
    """Write the pages, or compare with them."""
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        os.environ.pop(name, None)  # defaults are told as they are without them
    made = pages()
    for name, text in made.items():
        page = FOLDER / name
        if "--check" not in sys.argv[1:]:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
        elif not page.exists() or page.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{page} is not what the commands are now: run {Path(__file__).name}")


if __name__ == "__main__":
    main()
