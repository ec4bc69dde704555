"""The output limit sent to the backend is the recorded one, or the recorded error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer_recipe import (
    ChatCompletionRequest,
    ConversionError,
    ConversionOptions,
    MessagesRequest,
    ResponsesRequest,
)

REQUESTS: dict[str, Any] = {
    "chat": ChatCompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}


def test_max_tokens_resolve_as_recorded(limits_case: dict[str, Any]) -> None:
    request = REQUESTS[limits_case["protocol"]](limits_case["request"])
    converted = request.convert(ConversionOptions())
    counts = (limits_case["prompt_tokens"], limits_case["context_limit"])
    expected = limits_case["expect"]
    if "error" in expected:
        with pytest.raises(ConversionError) as caught:
            converted.resolve_max_tokens(*counts)
        assert json.loads(caught.value.body) == expected["error"]["body"]
        assert caught.value.status_code == expected["error"]["status"]
    else:
        assert converted.resolve_max_tokens(*counts) == expected["max_tokens"]
