"""The reviewed rules of `priors.yaml`: how much a kind of source is trusted before any link."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from deepinfer_search_fetch.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Rule:
    """suffix: of the host, whole labels. prior: 0..1. reviewed: the day somebody last looked."""

    suffix: str
    prior: float
    kind: str
    reason: str
    reviewed: str


class Priors:
    """Rules by suffix; the longest match wins, "gov.*" stands for gov.<country code>."""

    def __init__(self, rules: dict[str, Rule], unknown: Rule) -> None:
        self.rules = rules
        self.unknown = unknown

    def of_host(self, host: str) -> Rule:
        """The rule for a host."""
        labels = host.split(".")
        for i in range(len(labels)):
            found = self.rules.get(".".join(labels[i:]))
            if found is None and len(labels[-1]) == 2 and i < len(labels) - 1:
                found = self.rules.get(".".join([*labels[i:-1], "*"]))
            if found is not None:
                return found
        return self.unknown

    def extended(self, file: Path) -> Priors:
        """With an operator's rules on top of these."""
        own = _parse(file.read_text("utf-8"), str(file), self.unknown.prior)
        return Priors({**self.rules, **own.rules}, own.unknown)


@lru_cache(maxsize=1)
def load_priors() -> Priors:
    """The rules that ship with the package."""
    text = (files("deepinfer_search_fetch.index") / "priors.yaml").read_text("utf-8")
    return _parse(text, "priors.yaml", 0.35)


def _parse(text: str, name: str, unknown: float) -> Priors:
    def wrong(problem: str) -> InvalidRequestError:
        return InvalidRequestError("invalid_argument", f"{name}: {problem}")

    try:
        data: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise wrong(f"not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
        raise wrong("wanted a mapping with a list 'rules'")
    rules: dict[str, Rule] = {}
    for number, entry in enumerate(data["rules"]):
        missing = {"kind", "prior", "reviewed", "reason", "suffixes"} - set(entry or ())
        if missing:
            raise wrong(f"rule {number} lacks {', '.join(sorted(missing))}")
        prior = entry["prior"]
        if not isinstance(prior, (int, float)) or not 0 <= prior <= 1:
            raise wrong(f"rule {number}: prior {prior!r} is not a number from 0 to 1")
        for suffix in entry["suffixes"]:
            rules[str(suffix).lower()] = Rule(
                str(suffix).lower(),
                float(prior),
                str(entry["kind"]),
                str(entry["reason"]),
                str(entry["reviewed"]),
            )
    default = float(data.get("unknown", unknown))
    return Priors(rules, Rule("", default, "unknown", "no rule names this host", ""))
