"""Rendering for training: whole conversations, with the places the model must write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_recipe.conversation.conversation import Conversation
from deepinfer_recipe.conversation.image_source import ImageSource
from deepinfer_recipe.conversation.messages import Message
from deepinfer_recipe.conversation.special_tokens import DEFAULT_SPECIAL_TOKENS, SpecialTokens
from deepinfer_recipe.prompts.model_version import ModelVersion
from deepinfer_recipe.prompts.render import render, render_completion


@dataclass(frozen=True, slots=True)
class TrainingText:
    """A whole conversation as text.

    special_ranges: as in `RenderedPrompt`, over `text`.
    target_ranges: half-open code point ranges, one for each assistant turn, of what the model
        must write: from behind the token that opens the turn up to and including the
        end-of-sentence token. Everything outside is given.
    prompt_chars: `text[:prompt_chars]` is exactly the prompt that inference would send for
        the last turn; the rest is the last target.
    """

    text: str
    special_ranges: list[tuple[int, int]]
    target_ranges: list[tuple[int, int]]
    prompt_chars: int
    image_sources: list[ImageSource]

    @property
    def prompt(self) -> str:
        """The part that is given."""
        return self.text[: self.prompt_chars]

    @property
    def completion(self) -> str:
        """The part that is learned."""
        return self.text[self.prompt_chars :]


def _with_messages(conversation: Conversation, messages: Sequence[Message]) -> Conversation:
    return Conversation(
        messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
        response_format="json_object" if conversation.response_format == "json_object" else "text",
        response_schema=conversation.response_schema,
        response_regex=conversation.response_regex,
    )


def render_training(
    conversation: Conversation,
    version: ModelVersion = ModelVersion.DeepseekV41Flash,
    special_tokens: SpecialTokens = DEFAULT_SPECIAL_TOKENS,
) -> TrainingText:
    """Render a conversation that ends with an assistant message as one training text.

    The last assistant message, with its thinking and its tool calls, is the completion;
    everything before it is the prompt, byte for byte as inference renders it (so the thinking
    of earlier turns is kept with tools and dropped without, as there). Raises `ValueError` if
    the last message is not an assistant message.
    """
    messages = conversation.messages
    if not messages or messages[-1].role != "assistant":
        got = f"a {messages[-1].role} message" if messages else "no message"
        raise ValueError(f"a training conversation must end with an assistant message, got {got}")
    last = messages[-1]
    form = version.prompt_format
    prompt = render(_with_messages(conversation, messages[:-1]), form, special_tokens)
    completion = render_completion(last, conversation, form, special_tokens)
    offset = len(prompt.prompt)
    return TrainingText(
        text=prompt.prompt + completion.prompt,
        special_ranges=prompt.special_ranges
        + [(a + offset, b + offset) for a, b in completion.special_ranges],
        target_ranges=[*prompt.answer_ranges, (offset, offset + len(completion.prompt))],
        prompt_chars=offset,
        image_sources=prompt.image_sources,
    )
