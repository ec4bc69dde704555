"""Request settings that Responses answers repeat."""

from __future__ import annotations

from typing import Any

from deepinfer_recipe.protocols.common.builder import as_float32
from deepinfer_recipe.protocols.responses import body as wire
from deepinfer_recipe.protocols.responses.tools import echoed


class ResponsesEcho:
    """Request settings that Responses response objects report, as the request specified them.

    The constructor builds the settings of an unspecified request: no instructions, output
    token limit, or user; temperature and `top_p` of 1.0; zero `top_logprobs`.
    """

    __slots__ = ("_fields",)

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {
            "instructions": None,
            "max_output_tokens": None,
            "reasoning": {"effort": None, "summary": None},
            "temperature": 1.0,
            "text": {"format": {"type": "text"}, "verbosity": None},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0,
            "user": None,
        }

    @classmethod
    def of(cls, body: wire.ResponsesBody, tools: list[tuple[int, wire.Tool]]) -> ResponsesEcho:
        """The settings of a parsed request."""
        echo = cls()
        fields = echo._fields
        fields["instructions"] = body.instructions
        fields["max_output_tokens"] = body.max_output_tokens
        if body.reasoning is not None:
            fields["reasoning"] = body.reasoning.model_dump()
        if body.temperature is not None:
            fields["temperature"] = float(body.temperature)
        if body.top_p is not None:
            fields["top_p"] = float(body.top_p)
        if body.text is not None:
            fields["text"] = {
                "format": body.text.format.model_dump(by_alias=True),
                "verbosity": body.text.verbosity,
            }
        choice = body.tool_choice
        if choice is not None:
            fields["tool_choice"] = choice if isinstance(choice, str) else choice.model_dump()
        fields["tools"] = [echoed(tool) for _, tool in tools]
        fields["top_logprobs"] = body.top_logprobs or 0
        fields["user"] = body.user
        return echo

    def of_stored(self, body: wire.ResponsesBody, *, stores: bool) -> ResponsesEcho:
        """With what a store makes true beside them."""
        echo = ResponsesEcho()
        echo._fields = {
            **self._fields,
            "store": stores,
            "previous_response_id": body.previous_response_id,
            "metadata": body.metadata if isinstance(body.metadata, dict) else {},
        }
        return echo

    @property
    def fields(self) -> dict[str, Any]:
        """All reported settings, by their name in the response object."""
        return dict(self._fields)

    @property
    def instructions(self) -> str | None:
        """The requested instructions."""
        return self._fields["instructions"]

    @property
    def max_output_tokens(self) -> int | None:
        """The requested output limit."""
        return self._fields["max_output_tokens"]

    @property
    def temperature(self) -> float:
        """The requested temperature or 1.0, not the sampling temperature."""
        return as_float32(self._fields["temperature"])

    @property
    def top_p(self) -> float:
        """The requested `top_p` or 1.0, not the sampling `top_p`."""
        return as_float32(self._fields["top_p"])

    @property
    def top_logprobs(self) -> int:
        """The requested `top_logprobs`, or 0."""
        return self._fields["top_logprobs"]

    @property
    def user(self) -> str | None:
        """The requested user."""
        return self._fields["user"]
