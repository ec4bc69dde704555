"""Options of request conversion: what the deployment decides, not the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeAlias

from deepinfer_recipe.conversation.special_tokens import DEFAULT_SPECIAL_TOKENS, SpecialTokens
from deepinfer_recipe.documents.reader import DEFAULT_LIMITS, DocumentLimits
from deepinfer_recipe.prompts.model_version import ModelVersion
from deepinfer_recipe.prompts.template_model import TargetModel
from deepinfer_recipe.stores.sealing import ReasoningSealer

SearchResultText: TypeAlias = Callable[[Mapping[str, Any]], str]

MAX_TOKENS_UPPER_BOUND = 393216


class WebSearchBehavior(Enum):
    """Handling of supported web-search declarations, choices, and Messages blocks."""

    Drop = "Drop"
    """Drop matching declarations and choices, plus Messages server-tool blocks."""
    Reject = "Reject"
    """Reject matching declarations and choices, plus Messages server-tool blocks."""
    Run = "Run"
    """Declare a web-search function to the model, whose calls the server runs itself (extended
    profile; drops in parity). See `Answer.run_server_tools`.
    """

    def __repr__(self) -> str:
        return f"WebSearchBehavior.{self.name}"


class ReasoningContentBehavior(Enum):
    """Handling of assistant history missing reasoning content in thinking mode."""

    FillEmpty = "FillEmpty"
    """Fill missing reasoning content with an empty string."""
    Reject = "Reject"
    """Reject the request when reasoning content that must be passed back is missing."""

    def __repr__(self) -> str:
        return f"ReasoningContentBehavior.{self.name}"


def _default_models() -> dict[str, TargetModel]:
    return {
        "DeepSeek-V4-Pro": ModelVersion.DeepseekV4Pro,
        "DeepSeek-V4.1-Flash": ModelVersion.DeepseekV41Flash,
    }


@dataclass(frozen=True, kw_only=True)
class _Settings:
    default_thinking_mode: bool
    reasoning_content_behavior: ReasoningContentBehavior
    responses_web_search: WebSearchBehavior
    messages_web_search: WebSearchBehavior
    thinking_max_tokens_upper_bound: int
    non_thinking_max_tokens_upper_bound: int
    model_versions_by_name: MappingProxyType[str, TargetModel] = field(
        default_factory=lambda: MappingProxyType(_default_models())
    )
    special_tokens: SpecialTokens = DEFAULT_SPECIAL_TOKENS
    document_limits: DocumentLimits = DEFAULT_LIMITS
    reasoning_sealer: ReasoningSealer | None = None
    tool_call_logprobs: bool = False
    thinks_before_forced_calls: bool = False
    search_result_text: SearchResultText | None = None


class ConversionOptions:
    """Options for protocol request conversion; immutable, `with_*` return changed copies.

    By default, thinking mode is enabled, missing reasoning content is filled with an empty
    string, Responses `web_search` is dropped, Messages `web_search` is rejected, the model
    version is resolved from the request's model name (`DeepSeek-V4-Pro` or
    `DeepSeek-V4.1-Flash`), and the `max_tokens` upper bound is 393216 in and outside
    thinking mode.
    """

    __slots__ = ("_settings",)

    def __init__(
        self,
        *,
        default_thinking_mode: bool = True,
        reasoning_content_behavior: ReasoningContentBehavior = ReasoningContentBehavior.FillEmpty,
        responses_web_search: WebSearchBehavior = WebSearchBehavior.Drop,
        messages_web_search: WebSearchBehavior = WebSearchBehavior.Reject,
        thinking_max_tokens_upper_bound: int = MAX_TOKENS_UPPER_BOUND,
        non_thinking_max_tokens_upper_bound: int = MAX_TOKENS_UPPER_BOUND,
    ) -> None:
        self._settings = _Settings(
            default_thinking_mode=default_thinking_mode,
            reasoning_content_behavior=reasoning_content_behavior,
            responses_web_search=responses_web_search,
            messages_web_search=messages_web_search,
            thinking_max_tokens_upper_bound=thinking_max_tokens_upper_bound,
            non_thinking_max_tokens_upper_bound=non_thinking_max_tokens_upper_bound,
        )

    def _with(self, **changes: object) -> ConversionOptions:
        new = ConversionOptions.__new__(ConversionOptions)
        new._settings = replace(self._settings, **changes)  # type: ignore[arg-type]
        return new

    @property
    def default_thinking_mode(self) -> bool:
        """Whether requests that do not specify a thinking mode use thinking mode."""
        return self._settings.default_thinking_mode

    @property
    def model_versions_by_name(self) -> dict[str, TargetModel]:
        """The target model version of each accepted request model name."""
        return dict(self._settings.model_versions_by_name)

    @property
    def thinking_max_tokens_upper_bound(self) -> int:
        """The largest accepted `max_tokens` of a request in thinking mode.

        Chat Completions and Responses reject a larger value; Messages lowers it to this bound.
        """
        return self._settings.thinking_max_tokens_upper_bound

    @property
    def non_thinking_max_tokens_upper_bound(self) -> int:
        """The largest accepted `max_tokens` of a request outside thinking mode."""
        return self._settings.non_thinking_max_tokens_upper_bound

    @property
    def reasoning_content_behavior(self) -> ReasoningContentBehavior:
        """Missing-reasoning-content behavior, defaulting to `FillEmpty`."""
        return self._settings.reasoning_content_behavior

    @property
    def responses_web_search(self) -> WebSearchBehavior:
        """Responses web-search behavior, defaulting to `Drop`."""
        return self._settings.responses_web_search

    @property
    def messages_web_search(self) -> WebSearchBehavior:
        """Messages web-search behavior, defaulting to `Reject`."""
        return self._settings.messages_web_search

    @property
    def document_limits(self) -> DocumentLimits:
        """What the documents of a request may cost (extended profile)."""
        return self._settings.document_limits

    @property
    def reasoning_sealer(self) -> ReasoningSealer | None:
        """What seals the reasoning that Responses clients carry; None means a placeholder."""
        return self._settings.reasoning_sealer

    @property
    def tool_call_logprobs(self) -> bool:
        """Whether tokens of tool arguments have log probabilities too, where asked for."""
        return self._settings.tool_call_logprobs

    @property
    def thinks_before_forced_calls(self) -> bool:
        """Whether a forced tool leaves thinking on (extended profile).

        The call then follows the thinking and only a grammar can hold the model to it
        (`request_grammar`), so it is for hosts that enforce grammars. Otherwise thinking is off
        for that answer: its prompt opens the call, which needs no grammar.
        """
        return self._settings.thinks_before_forced_calls

    @property
    def search_result_text(self) -> SearchResultText | None:
        """Text for the model of a search-result block in a Messages history."""
        return self._settings.search_result_text

    @property
    def special_tokens(self) -> SpecialTokens:
        """Special token mapping, defaulting to the built-in mapping."""
        return self._settings.special_tokens

    def with_default_thinking_mode(self, default_thinking_mode: bool) -> ConversionOptions:
        """Construct options with the supplied default thinking mode."""
        return self._with(default_thinking_mode=default_thinking_mode)

    def with_reasoning_content_behavior(
        self, reasoning_content_behavior: ReasoningContentBehavior
    ) -> ConversionOptions:
        """Construct options with the supplied missing-reasoning-content behavior."""
        return self._with(reasoning_content_behavior=reasoning_content_behavior)

    def with_responses_web_search(
        self, responses_web_search: WebSearchBehavior
    ) -> ConversionOptions:
        """Construct options with the supplied Responses web-search behavior."""
        return self._with(responses_web_search=responses_web_search)

    def with_messages_web_search(self, messages_web_search: WebSearchBehavior) -> ConversionOptions:
        """Construct options with the supplied Messages web-search behavior."""
        return self._with(messages_web_search=messages_web_search)

    def with_special_tokens(self, special_tokens: SpecialTokens) -> ConversionOptions:
        """Construct options with the supplied special token mapping."""
        return self._with(special_tokens=special_tokens)

    def with_document_limits(self, document_limits: DocumentLimits) -> ConversionOptions:
        """Construct options with the supplied limits on documents."""
        return self._with(document_limits=document_limits)

    def with_thinking_before_forced_calls(self, thinks: bool) -> ConversionOptions:
        """Construct options that leave thinking on where a tool is forced, or not."""
        return self._with(thinks_before_forced_calls=thinks)

    def with_reasoning_sealer(self, sealer: ReasoningSealer | None) -> ConversionOptions:
        """Construct options that seal reasoning in Responses and open it on input."""
        return self._with(reasoning_sealer=sealer)

    def with_tool_call_logprobs(self, tool_call_logprobs: bool) -> ConversionOptions:
        """Construct options that report log probabilities on tool arguments or do not."""
        return self._with(tool_call_logprobs=tool_call_logprobs)

    def with_search_result_text(
        self, search_result_text: SearchResultText | None
    ) -> ConversionOptions:
        """Construct options with a function that gives the model's text of a result block.

        It gets each `web_search_tool_result` block of a Messages history; without one, the
        titles and addresses are shown.
        """
        return self._with(search_result_text=search_result_text)

    def with_model_alias(self, model: str, model_version: TargetModel) -> ConversionOptions:
        """Accept `model` as a name of `model_version`; adds the name or replaces its version."""
        return self.with_model_versions_by_name(
            {**self._settings.model_versions_by_name, model: model_version}
        )

    def with_model_versions_by_name(
        self, model_versions_by_name: dict[str, TargetModel]
    ) -> ConversionOptions:
        """Replace the whole table of accepted model names, the default names included."""
        return self._with(model_versions_by_name=MappingProxyType(dict(model_versions_by_name)))

    def with_thinking_max_tokens_upper_bound(
        self, thinking_max_tokens_upper_bound: int
    ) -> ConversionOptions:
        """Construct options with the supplied bound in thinking mode."""
        return self._with(thinking_max_tokens_upper_bound=thinking_max_tokens_upper_bound)

    def with_non_thinking_max_tokens_upper_bound(
        self, non_thinking_max_tokens_upper_bound: int
    ) -> ConversionOptions:
        """Construct options with the supplied bound outside thinking mode."""
        return self._with(non_thinking_max_tokens_upper_bound=non_thinking_max_tokens_upper_bound)

    def __repr__(self) -> str:
        return f"ConversionOptions({self._settings!r})"
