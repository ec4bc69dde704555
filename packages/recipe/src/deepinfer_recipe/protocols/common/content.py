"""Joining content parts into the text of a message, pictures as placeholders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deepinfer_recipe.conversation.image_source import ImageSource
from deepinfer_recipe.conversation.messages import SystemMessage, ToolMessage, UserMessage
from deepinfer_recipe.prompts.prompt_builder import UNSUPPORTED_IMAGE

SEPARATOR = "\n\n"


@dataclass
class JoinedContent:
    """Text parts and pictures joined by blank lines.

    segments: the text between the pictures. A format without pictures gets a note instead.
    """

    has_pictures: bool
    image_token: str
    segments: list[str] = field(default_factory=lambda: [""])
    sources: list[ImageSource] = field(default_factory=list[ImageSource])
    _is_empty: bool = True

    def _separate(self) -> None:
        if not self._is_empty:
            self.segments[-1] += SEPARATOR
        self._is_empty = False

    def add(self, part: str | ImageSource) -> None:
        """Append a part."""
        self._separate()
        if isinstance(part, str):
            self.segments[-1] += part
        elif self.has_pictures:
            self.sources.append(part)
            self.segments.append("")
        else:
            self.segments[-1] += UNSUPPORTED_IMAGE

    def extend(self, parts: Iterable[str | ImageSource]) -> JoinedContent:
        """Append parts; returns self."""
        for part in parts:
            self.add(part)
        return self

    @property
    def text(self) -> str:
        """The joined text, pictures spelled as the image token."""
        return self.image_token.join(self.segments)

    def user(self) -> UserMessage:
        """As a user message."""
        return UserMessage.from_segments(tuple(self.segments), self.sources, self.image_token)

    def system(self) -> SystemMessage:
        """As a system message."""
        message = SystemMessage.from_segments(tuple(self.segments), self.sources, self.image_token)
        return message

    def tool(self, tool_call_id: str | None) -> ToolMessage:
        """As the result of a call."""
        message = ToolMessage.from_segments(tuple(self.segments), self.sources, self.image_token)
        return message.answering(tool_call_id)
