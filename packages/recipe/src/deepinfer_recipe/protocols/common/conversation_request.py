"""The result of conversion: a conversation with everything that must travel with it."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.conversation.conversation import Conversation
from deepinfer_recipe.conversation.inference import InferenceOptions
from deepinfer_recipe.conversation.parsing_options import ParsingOptions
from deepinfer_recipe.conversation.policy import Policy, Profile, policy_of
from deepinfer_recipe.conversation.server_tools import ServerTool
from deepinfer_recipe.prompts.template_model import TargetModel

DEFAULT_MAX_TOKENS = 8192
DEFAULT_THINKING_MAX_TOKENS = 65536
DEFAULT_MAX_EFFORT_MAX_TOKENS = 131072


class ConversationRequest:
    """A conversation request with inference and parsing options."""

    __slots__ = (
        "_answer_settings",
        "_conversation",
        "_include_usage",
        "_inference_options",
        "_model_version",
        "_parsing_options",
        "_policy",
        "_server_tools",
        "_stream",
        "_user",
    )

    def __init__(
        self,
        conversation: Conversation,
        model_version: TargetModel,
        *,
        inference_options: InferenceOptions | None = None,
        parsing_options: ParsingOptions | None = None,
        stream: bool = False,
        include_usage: bool = False,
        user: str | None = None,
        profile: Profile = "parity",
        server_tools: Mapping[str, ServerTool] | None = None,
    ) -> None:
        """Construct a request; options default to those of an unspecified request."""
        self._conversation = conversation
        self._model_version = model_version
        self._inference_options = inference_options or InferenceOptions()
        self._parsing_options = parsing_options or ParsingOptions()
        self._stream = stream
        self._include_usage = include_usage
        self._user = user
        self._policy = policy_of(profile)
        self._server_tools = dict(server_tools or {})
        self._answer_settings: object = None

    @property
    def answer_settings(self) -> object:
        """What the protocol's generator needs beyond this request; private to the protocol."""
        return self._answer_settings

    def with_answer_settings(self, settings: object) -> ConversationRequest:
        """Attach what the protocol's generator needs; returns self."""
        self._answer_settings = settings
        return self

    @property
    def server_tools(self) -> dict[str, ServerTool]:
        """Tools among the declared ones whose calls the server runs itself, by name."""
        return dict(self._server_tools)

    @property
    def conversation(self) -> Conversation:
        """What to render."""
        return self._conversation

    @property
    def inference_options(self) -> InferenceOptions:
        """What to tell the sampler."""
        return self._inference_options

    @property
    def parsing_options(self) -> ParsingOptions:
        """How to read the answer."""
        return self._parsing_options

    @property
    def model_version(self) -> TargetModel:
        """The target model version, resolved from the request's model name."""
        return self._model_version

    @property
    def stream(self) -> bool:
        """Whether the protocol request asks for a streamed response."""
        return self._stream

    @property
    def include_usage(self) -> bool:
        """Whether a streamed Chat Completions response reports usage."""
        return self._include_usage

    @property
    def user(self) -> str | None:
        """The end user the request names (`user_id`, `user`, `metadata.user_id`), if any."""
        return self._user

    @property
    def profile(self) -> Profile:
        """The profile the request was parsed under."""
        return self._policy.name

    @property
    def policy(self) -> Policy:
        """What the profile does, field by field."""
        return self._policy

    def resolve_max_tokens(self, prompt_tokens: int, context_limit: int) -> int:
        """Resolve the `max_tokens` to send to the backend.

        `prompt_tokens` is the number of tokens in the encoded prompt, each image counted at
        its image token count, and `context_limit` the number of tokens the model's context
        holds. A requested `max_tokens` is kept; an unspecified one becomes 8192 outside
        thinking mode, 131072 in thinking mode with `max` effort, and 65536 in thinking mode
        otherwise. The result is lowered to the context left after the prompt and raised to at
        least 1. Raises `ConversionError` when `prompt_tokens` plus the requested `max_tokens`
        exceeds `context_limit`, or, without a requested one, when `prompt_tokens` alone does.
        """
        requested = self._inference_options.max_tokens
        total = prompt_tokens + (requested or 0)
        if total > context_limit:
            raise ConversionError(
                too_long_message(context_limit, prompt_tokens, requested),
                param="messages",
                code="context_length_exceeded",
            )
        if requested is None:
            requested = DEFAULT_MAX_TOKENS
            if self._conversation.thinking_mode:
                is_max = self._conversation.reasoning_effort == "max"
                requested = DEFAULT_MAX_EFFORT_MAX_TOKENS if is_max else DEFAULT_THINKING_MAX_TOKENS
        return max(1, min(requested, context_limit - prompt_tokens))


def too_long_message(context_limit: int, prompt_tokens: int, requested: int | None) -> str:
    """The error text for a prompt that does not fit, with all the numbers."""
    completion = requested or 0
    return (
        f"This model's maximum context length is {context_limit} tokens. However, you requested "
        f"{prompt_tokens + completion} tokens ({prompt_tokens} in the messages, {completion} in "
        "the completion). Please reduce the length of the messages or completion."
    )
