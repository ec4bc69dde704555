"""The thinking switches of other servers, as their clients send them (extended profile).

`chat_template_kwargs: {thinking | enable_thinking: bool}` (vLLM, SGLang), `enable_thinking: bool`
and `thinking_budget: int` (Qwen's API), `reasoning: {enabled | effort | max_tokens}` (OpenRouter).
This API's own `thinking` and `reasoning_effort` win over all of them.
"""

from __future__ import annotations

from typing import Any, cast, get_args

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.protocols.chat import body as wire
from deepinfer_recipe.protocols.common.builder import RequestedEffort, ThinkingType


def asked_thinking(body: wire.ChatBody) -> tuple[ThinkingType | None, RequestedEffort | None]:
    """What a body says of thinking, by whatever field. Raises `ConversionError`."""
    own = body.thinking.type if body.thinking else None
    if own is not None or body.reasoning_effort is not None:
        return own, body.reasoning_effort
    kwargs = _object(body.chat_template_kwargs, "chat_template_kwargs")
    for value, place in (
        (kwargs.get("thinking"), "chat_template_kwargs.thinking"),
        (kwargs.get("enable_thinking"), "chat_template_kwargs.enable_thinking"),
        (body.enable_thinking, "enable_thinking"),
    ):
        if value is not None:
            return _switch(value, place), None
    if body.thinking_budget is not None:
        return _budget(body.thinking_budget, "thinking_budget"), None
    return _reasoning(_object(body.reasoning, "reasoning"))


def _reasoning(fields: dict[str, Any]) -> tuple[ThinkingType | None, RequestedEffort | None]:
    effort = fields.get("effort")
    if effort is not None and effort not in get_args(RequestedEffort):
        known = ", ".join(f"`{name}`" for name in get_args(RequestedEffort))
        raise ConversionError(
            f"reasoning.effort: expected one of {known}, got {effort!r:.60}",
            param="reasoning.effort",
        )
    asked = cast("RequestedEffort | None", effort)
    if fields.get("enabled") is not None:
        return _switch(fields["enabled"], "reasoning.enabled"), asked
    if asked is None and fields.get("max_tokens") is not None:
        return _budget(fields["max_tokens"], "reasoning.max_tokens"), None
    return None, asked


def _object(value: Any, place: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConversionError(f"{place}: expected an object, got {value!r:.60}", param=place)
    return cast("dict[str, Any]", value)


def _switch(value: Any, place: str) -> ThinkingType:
    if not isinstance(value, bool):
        raise ConversionError(f"{place}: expected true or false, got {value!r:.60}", param=place)
    return "enabled" if value else "disabled"


def _budget(value: Any, place: str) -> ThinkingType:
    """No tokens of thinking is no thinking; a budget beyond that has no counterpart here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConversionError(
            f"{place}: expected a number of tokens, 0 for none, got {value!r:.60}", param=place
        )
    return "enabled" if value else "disabled"
