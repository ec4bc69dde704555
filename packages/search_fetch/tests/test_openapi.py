"""The REST contract, recorded: `pytest --update-api` rewrites tests/openapi.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_search_fetch import AsyncSearchFetch, Config
from deepinfer_search_fetch.service.app import create_app
from deepinfer_search_fetch.service.metering import Ledger

RECORDED = Path(__file__).parent / "openapi.json"
# What says nothing about the contract, or is worded by the versions of FastAPI and pydantic.
_NOISE = ("title", "description", "summary", "operationId", "tags", "examples")


def contract(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        keep = name in ("properties", "paths", "schemas", "$defs")
        return {k: contract(v, k) for k, v in sorted(value.items()) if keep or k not in _NOISE}
    return [contract(v) for v in value] if isinstance(value, list) else value


@pytest.fixture
def document(config: Config) -> Any:
    config.home.mkdir(parents=True)
    ledger = Ledger(config.home / "ledger.sqlite3")
    app = create_app(AsyncSearchFetch(config), ledger, None)
    ledger.close()
    return app.openapi()


def test_the_contract_is_the_recorded_one(document: Any, request: pytest.FixtureRequest) -> None:
    found = contract({"paths": document["paths"], "components": document["components"]})
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    if request.config.getoption("--update-api"):
        RECORDED.write_text(text)
    assert json.loads(text) == json.loads(RECORDED.read_text())


def test_every_operation_documents_our_error_body(document: Any) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for status in ("401", "422", "429", "500", "503"):
                schema = operation["responses"][status]["content"]["application/json"]["schema"]
                assert schema["$ref"].endswith("/ErrorBody"), (path, status)
    assert "HTTPValidationError" not in document["components"]["schemas"]
