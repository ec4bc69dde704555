"""Where a configuration comes from: a TOML file, the environment, `--set`; later ones win.

Every field of `Config` has the same name everywhere: `host_burst = 8` or `[limits] redirects = 5`
in the file, DEEPINFER_SEARCH_FETCH_HOST_BURST or ..._LIMITS_REDIRECTS in the environment, and
`--set host_burst=8` or `--set limits.redirects=5` on the command line. Lists are written with
commas outside of the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from deepinfer_search_fetch.config import HOME_VARIABLE, Config, Limits, default_home
from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.json_values import as_object

CONFIG_FILE = "config.toml"
PREFIX = HOME_VARIABLE.removesuffix("HOME")
_SECRETS = frozenset({"brave_key", "egress_proxy"})
SourceName = Literal["default", "file", "environment", "flag"]


@dataclass(frozen=True, slots=True)
class Configured:
    """A configuration, and per dotted field name which source set it."""

    config: Config
    sources: dict[str, SourceName]
    file: Path | None

    def rows(self) -> list[tuple[str, Any, SourceName]]:
        """(name, value, source) of every field; secrets are not shown."""
        values = self.config.model_dump(mode="json")
        limits = values.pop("limits")
        named = [*values.items(), *((f"limits.{k}", v) for k, v in limits.items())]
        return [
            (k, "set" if k in _SECRETS and v is not None else v, self.sources.get(k, "default"))
            for k, v in named
        ]


@dataclass(slots=True)
class _Values:
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    sources: dict[str, SourceName] = field(default_factory=dict[str, SourceName])
    wheres: dict[str, str] = field(default_factory=dict[str, str])

    def put(self, name: str, value: Any, source: SourceName, where: str) -> None:
        """Set a dotted name. Raises InvalidRequestError for one that does not exist."""
        model, _, key = name.rpartition(".")
        fields = Limits.model_fields if model == "limits" else Config.model_fields
        if model not in ("", "limits") or key not in fields or name == "limits":
            raise InvalidRequestError(
                "invalid_argument",
                f"{where}: there is no setting {name!r}; `search-fetch config show` lists them",
            )
        if isinstance(value, str):
            value = _read(value, fields[key].annotation)
        target = self.values.setdefault("limits", {}) if model else self.values
        target[key] = value
        self.sources[name], self.wheres[name] = source, where


def configure(
    flags: Mapping[str, Any],
    settings: Iterable[str] = (),
    *,
    file: Path | None = None,
    environ: Mapping[str, str],
) -> Configured:
    """The configuration of one command.

    flags: fields that have an option of their own, None for those not given. settings:
    `name=value`, as `--set` takes them. file: instead of config.toml in the home folder.
    Raises InvalidRequestError naming the file, variable or option.
    """
    found = _Values()
    given = list(settings)
    home = flags.get("home") or _home_of(given) or environ.get(HOME_VARIABLE) or default_home()
    path = file or Path(home) / CONFIG_FILE
    used = path if file is not None or path.is_file() else None
    if used is not None:
        for name, value in _flat(_toml(used)):
            found.put(name, value, "file", str(used))
    for name in _names():
        variable = PREFIX + name.replace(".", "_").upper()
        if environ.get(variable):
            found.put(name, environ[variable], "environment", variable)
    for setting in given:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InvalidRequestError(
                "invalid_argument", f"--set {setting}: write it as name=value"
            )
        found.put(name.strip(), value.strip(), "flag", f"--set {name.strip()}")
    for name, value in flags.items():
        if value is not None:
            found.put(name, value, "flag", f"--{name.replace('_', '-')}")
    return Configured(_config(found), found.sources, used)


def _config(found: _Values) -> Config:
    try:
        return Config(**found.values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(p) for p in first["loc"] if isinstance(p, str))
        where = found.wheres.get(name, name)
        raise InvalidRequestError("invalid_argument", f"{where}: {name}: {first['msg']}") from None


def _home_of(settings: Iterable[str]) -> str | None:
    homes = [s.partition("=")[2].strip() for s in settings if s.partition("=")[0].strip() == "home"]
    return homes[-1] if homes else None


def _names() -> list[str]:
    fields = [name for name in Config.model_fields if name != "limits"]
    return [*fields, *(f"limits.{name}" for name in Limits.model_fields)]


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequestError("invalid_argument", f"{file}: {error}") from None


def _flat(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        table = as_object(value)
        if table is None:
            yield name, value
        else:
            yield from ((f"{name}.{key}", inner) for key, inner in table.items())


def _read(text: str, annotation: Any) -> Any:
    """A value written as text: "none" where a field may be None, commas in a list."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = get_args(annotation)
        if text.lower() in ("", "none") and type(None) in kinds:
            return None
        return text
    if get_origin(annotation) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    if annotation in (bool, "bool") and text.lower() in ("on", "off"):
        return text.lower() == "on"
    return text
