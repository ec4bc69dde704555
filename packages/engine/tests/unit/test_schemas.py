"""The schemas in docs/ are those of the code, and a change of one is a new version."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import jsonschema_rs
import pytest

from deepinfer_kvtier import KVEvent

TOOL = Path(__file__).parents[2] / "tools" / "write_schemas.py"
spec = importlib.util.spec_from_file_location("write_schemas", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.mark.parametrize("name", list(tool.documents()))
def test_a_changed_schema_is_a_new_version(name):
    version, document = tool.documents()[name]
    known = json.loads((tool.DOCS / "schema-versions.json").read_text())[name]
    assert known.get(str(version)) == tool.digest(document), (
        f"the schema of {name} changed: raise its version and run {TOOL.name}"
    )
    assert json.loads((tool.DOCS / f"{name}.json").read_text())["version"] == version


def test_a_sentence_may_change_within_a_version_and_a_field_may_not():
    _, document = tool.documents()["worker-messages"]
    before = tool.digest(document)
    changed = json.loads(json.dumps(document))
    changed["$defs"]["Reserve"]["description"] = "other words"
    assert tool.digest(changed) == before
    changed["$defs"]["Reserve"]["properties"]["description"] = {"type": "string"}
    assert tool.digest(changed) != before


def test_a_cache_event_is_told_as_its_schema_has_it():
    _, document = tool.documents()["cache-events"]
    event = KVEvent("stored", "block", "disk", bytes(range(16)), None, 3)
    told = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in dataclasses.asdict(event).items()
    }
    jsonschema_rs.validate(document, told)
    for change in ({"what": "lost"}, {"tier": None}, {"key": "zz"}, {"more": 1}):
        with pytest.raises(jsonschema_rs.ValidationError):
            jsonschema_rs.validate(document, {**told, **change})
