"""Write the JSON Schemas of docs/ from the code: `python packages/engine/tools/write_schemas.py`.

A change of a schema is a new version: raise `pd.wire.VERSION` (messages between workers),
`codec.schemas.REQUESTS_VERSION` (what clients send) or `adapters.kvtier.CACHE_EVENTS_VERSION` (what
a cache tells) with it, and run this again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from deepinfer_engine.adapters.kvtier import CACHE_EVENTS_VERSION, cache_event_schema
from deepinfer_engine.codec.schemas import REQUESTS_VERSION, request_schemas
from deepinfer_engine.pd.schema import json_schema
from deepinfer_engine.pd.wire import VERSION

DOCS = Path(__file__).parents[1] / "docs"


def documents() -> dict[str, tuple[int, dict[str, Any]]]:
    """File name -> (version, schema)."""
    requests = {"version": REQUESTS_VERSION, "schemas": request_schemas()}
    return {
        "worker-messages": (VERSION, json_schema()),
        "requests": (REQUESTS_VERSION, requests),
        "cache-events": (CACHE_EVENTS_VERSION, cache_event_schema()),
    }


def digest(document: dict[str, Any]) -> str:
    """Of what a document promises: sentences may change without a new version."""
    return hashlib.sha256(json.dumps(_bare(document), sort_keys=True).encode()).hexdigest()


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _bare(inner)
            for key, inner in value.items()
            if not (key in ("description", "title") and isinstance(inner, str))
        }
    return [_bare(inner) for inner in value] if isinstance(value, list) else value


def main() -> None:
    versions_file = DOCS / "schema-versions.json"
    known = json.loads(versions_file.read_text()) if versions_file.exists() else {}
    for name, (version, document) in documents().items():
        (DOCS / f"{name}.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
        versions, now = known.setdefault(name, {}), digest(document)
        if versions.get(str(version), now) != now:
            raise SystemExit(f"{name} changed within version {version}: raise the version")
        versions[str(version)] = now
    versions_file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
