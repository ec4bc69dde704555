"""Prompt encodings: a conversation to prompt text, and with a tokenizer to token ids."""

from __future__ import annotations

from typing import Self

from deepinfer_recipe.base.errors import EncodeError
from deepinfer_recipe.conversation.conversation import Conversation
from deepinfer_recipe.conversation.special_tokens import DEFAULT_SPECIAL_TOKENS, SpecialTokens
from deepinfer_recipe.prompts.formats.prompt_format import PromptFormat
from deepinfer_recipe.prompts.formats.v4 import V4
from deepinfer_recipe.prompts.formats.v4_1 import V4_1
from deepinfer_recipe.prompts.model_version import ModelVersion
from deepinfer_recipe.prompts.render import RenderedPrompt, render
from deepinfer_recipe.prompts.template_model import TargetModel, TemplateModel
from deepinfer_recipe.prompts.tokenizer import Tokenizer


class PromptEncoding:
    """Renders a conversation and, with an attached tokenizer, encodes it into token ids."""

    __slots__ = ("_special_tokens", "_tokenizer")
    _format: PromptFormat

    def __init__(self) -> None:
        self._tokenizer: Tokenizer | None = None
        self._special_tokens = DEFAULT_SPECIAL_TOKENS

    def with_tokenizer(self, tokenizer: Tokenizer) -> Self:
        """Return a new prompt encoding that uses `tokenizer` for `encode`."""
        new = type(self)()
        new._tokenizer = tokenizer
        new._special_tokens = self._special_tokens
        return new

    def with_special_tokens(self, special_tokens: SpecialTokens) -> Self:
        """Return a new prompt encoding that renders prompts with `special_tokens`."""
        new = type(self)()
        new._tokenizer = self._tokenizer
        new._special_tokens = special_tokens
        return new

    def render_conversation(self, conversation: Conversation) -> RenderedPrompt:
        """Render the prompt that asks for the next assistant turn."""
        return render(conversation, self._format, self._special_tokens)

    def encode(self, conversation: Conversation) -> list[int]:
        """Encode a conversation into token ids using the attached tokenizer.

        Raises `EncodeError` (a `RuntimeError`) when no tokenizer is attached or the
        tokenizer lacks a special token of the prompt.
        """
        if self._tokenizer is None:
            raise EncodeError(
                "no tokenizer is attached to the encoding; call with_tokenizer(tokenizer) first"
            )
        rendered = self.render_conversation(conversation)
        return self._tokenizer.encode_prompt(rendered.prompt, rendered.special_ranges)


class DeepseekV4Encoding(PromptEncoding):
    """The V4 prompt encoding."""

    __slots__ = ()
    _format = V4


class DeepseekV41Encoding(PromptEncoding):
    """The V4.1 prompt encoding."""

    __slots__ = ()
    _format = V4_1


class TemplateEncoding:
    """Renders conversations by a model's chat template."""

    __slots__ = ("_model",)

    def __init__(self, model: TemplateModel) -> None:
        self._model = model

    def with_special_tokens(self, special_tokens: SpecialTokens) -> Self:
        """Itself: the tokens are the template's own."""
        return self

    def render_conversation(self, conversation: Conversation) -> RenderedPrompt:
        """Render the prompt that asks for the next assistant turn."""
        return self._model.render(conversation)


def encoding_for(version: TargetModel) -> PromptEncoding | TemplateEncoding:
    """The prompt encoding of a model."""
    if isinstance(version, TemplateModel):
        return TemplateEncoding(version)
    if version is ModelVersion.DeepseekV41Flash:
        return DeepseekV41Encoding()
    return DeepseekV4Encoding()
