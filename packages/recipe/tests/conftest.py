"""Options, corpus cases and helpers shared by the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_recipe import (
    ConversionOptions,
    ModelVersion,
    ReasoningContentBehavior,
    WebSearchBehavior,
)

CORPUS = Path(__file__).parent / "corpus"
CORPUS_FIXTURES = {
    "convert_case": "convert.jsonl",
    "stream_case": "stream.jsonl",
    "tokens_case": "tokens_v4.jsonl",
    "images_case": "images.jsonl",
    "limits_case": "limits.jsonl",
}


def read_cases(name: str) -> list[dict[str, Any]]:
    lines = (CORPUS / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes e.g. `convert_case` runs once for every case of that corpus file."""
    for fixture, name in CORPUS_FIXTURES.items():
        if fixture in metafunc.fixturenames:
            cases = read_cases(name)
            metafunc.parametrize(fixture, cases, ids=[case["id"] for case in cases])


def conversion_options(case: dict[str, Any]) -> ConversionOptions:
    options = ConversionOptions()
    for name, value in case.get("options", {}).items():
        if name == "model_aliases":
            for alias, version in value.items():
                options = options.with_model_alias(alias, ModelVersion(version))
            continue
        if name.endswith("web_search"):
            value = WebSearchBehavior(value)
        elif name == "reasoning_content_behavior":
            value = ReasoningContentBehavior(value)
        options = getattr(options, f"with_{name}")(value)
    return options


@pytest.fixture(scope="session")
def options_of() -> Callable[[dict[str, Any]], ConversionOptions]:
    """Makes the options that a corpus case was recorded with."""
    return conversion_options


@pytest.fixture(scope="session")
def corpus() -> Callable[[str], list[dict[str, Any]]]:
    """Reads all cases of a corpus file."""
    return read_cases
