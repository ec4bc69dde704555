"""Which family answers to a checkpoint. No torch."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.model.dense.family import Dense
from deepinfer_engine.model.family import Family, FamilyConfig
from deepinfer_engine.model.files import checked, read_config_json
from deepinfer_engine.model.v41.family import DeepseekV41

log = logging.getLogger(__name__)

ENTRY_POINTS = "deepinfer.families"
"""Group of entry points whose objects are called without arguments and give a `Family`."""


@cache
def families() -> dict[str, Family]:
    """Architecture -> family: ours, then those of other distributions, which may not replace one
    of ours."""
    found: dict[str, Family] = {}
    own: tuple[Family, ...] = (DeepseekV41(), Dense())
    for family in own:
        found.update(dict.fromkeys(family.architectures, family))
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            family = entry.load()()
            names = tuple(family.architectures)
        except Exception as error:
            log.warning("the model family %s cannot be used: %s", entry.value, error)
            continue
        for name in names:
            if name in found:
                log.warning("%s has a family already; %s is not used", name, entry.value)
            else:
                found[name] = family
    return found


def family_of(model_dir: Path) -> Family:
    """The family of a checkpoint directory.

    Raises CheckpointError: no readable config.json, or an architecture that nothing here runs.
    """
    named = read_config_json(model_dir).get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    family = families().get(name) if isinstance(name, str) else None
    if family is None:
        raise CheckpointError(
            f"{model_dir / 'config.json'}: architectures: {named!r} is not a model that runs here; "
            f"these do: {', '.join(sorted(families()))}"
        )
    return family


def load_family_config(model_dir: Path) -> tuple[Family, FamilyConfig]:
    """A checkpoint directory's family and checked configuration. Raises CheckpointError."""
    family = family_of(model_dir)
    return family, checked(model_dir, family.read_config)
