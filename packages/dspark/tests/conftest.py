from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-api", action="store_true", help="rewrite tests/api.txt")
