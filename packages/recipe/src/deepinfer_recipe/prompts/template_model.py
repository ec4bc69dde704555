"""Models that bring a chat template: their conversations to prompts, whatever the template lacks.

What users typed never becomes a special token here either: wherever a message spells one, a
character that no text holds is put inside before the template runs, and taken out of the prompt
again. What spells a special token then was written by the template.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from deepinfer_recipe.base.errors import (
    ConversionError,
    TemplateRefusedError,
    TemplateUnusableError,
)
from deepinfer_recipe.base.json_text import parse_object
from deepinfer_recipe.conversation.conversation import Conversation
from deepinfer_recipe.conversation.messages import Message
from deepinfer_recipe.conversation.parsing_options import Dialect
from deepinfer_recipe.conversation.tool_types import ToolCall
from deepinfer_recipe.prompts.chat_template import ChatTemplate
from deepinfer_recipe.prompts.formats.prompt_format import PromptFormat
from deepinfer_recipe.prompts.formats.v4 import V4
from deepinfer_recipe.prompts.model_version import ModelVersion
from deepinfer_recipe.prompts.render import RenderedPrompt

_BREAK = "\ufdd0"
"""A code point that is no character and that nobody may exchange."""
_ESCAPED_BREAK = "\\ufdd0"
_THINK_START, _THINK_END = "<think>", "</think>"
_MISTRAL_ID_CHARS = 9
DialectChoice: TypeAlias = Dialect | Literal["auto"]
TEMPLATE_FORMAT: PromptFormat = replace(V4, name="template", has_pictures=False)
"""The rules of conversion for these models: system text to the front, no pictures."""

_TOOLS_HEAD = """# Tools

You may call functions to answer. Each line between <tools> and </tools> describes one as JSON:
<tools>
"""
_TOOLS_TAIL = """
</tools>

To call a function, write a JSON object with its name and its arguments between tags, one pair of \
tags for each call:
<tool_call>
{"name": "<name of the function>", "arguments": {<its arguments>}}
</tool_call>"""
_JSON_NOTE = "Answer with one JSON object and nothing else."
_SCHEMA_NOTE = "Answer with JSON and nothing else. It must be valid by this JSON Schema:\n"


class TemplateModel:
    """A model with a chat template, as a target of conversion beside `ModelVersion`.

    template: the template, or several by name (`default`, `tool_use`), as text.
    special_tokens: spellings of the tokenizer's added vocabulary.
    dialect: how the model writes tool calls: `hermes`, `llama3` or `mistral`; found out from the
        template by default.

    Raises TemplateUnusableError for a template that cannot be used.
    """

    def __init__(
        self,
        template: str | Mapping[str, str],
        *,
        special_tokens: Sequence[str] = (),
        bos_token: str = "",
        eos_token: str = "",
        dialect: DialectChoice = "auto",
    ) -> None:
        sources = {"default": template} if isinstance(template, str) else dict(template)
        if not sources:
            raise TemplateUnusableError("no chat template was given")
        self._templates = {name: ChatTemplate(source) for name, source in sources.items()}
        self._default = self._templates.get("default") or next(iter(self._templates.values()))
        self._bos, self._eos = bos_token, eos_token
        spelled = {
            token for token in (*special_tokens, bos_token, eos_token) if len(token.strip()) > 1
        }
        self.special_tokens = tuple(sorted(spelled, key=len, reverse=True))
        alternatives = "|".join(map(re.escape, self.special_tokens))
        self._specials = re.compile(alternatives) if alternatives else None
        self.dialect: Dialect = self._found_dialect() if dialect == "auto" else dialect

    @classmethod
    def from_directory(
        cls, folder: str | Path, *, dialect: DialectChoice = "auto"
    ) -> TemplateModel:
        """With the template, the tokens and the added vocabulary of a model's directory.

        Raises `TemplateUnusableError` if it has no template or a file cannot be read.
        """
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        template: Any = config.get("chat_template")
        own = folder / "chat_template.jinja"
        if own.exists():
            template = own.read_text(encoding="utf-8")
        if isinstance(template, list):
            template = {str(one.get("name")): str(one.get("template")) for one in template}
        if not isinstance(template, str | dict) or not template:
            raise TemplateUnusableError(
                f"{folder} has no chat template: expected chat_template.jinja, or `chat_template` "
                "in tokenizer_config.json"
            )
        added = _read_json(folder / "tokenizer.json").get("added_tokens") or ()
        tokens = [str(one["content"]) for one in added if isinstance(one, dict)]
        return cls(
            template,
            special_tokens=tokens,
            bos_token=_token_text(config.get("bos_token")),
            eos_token=_token_text(config.get("eos_token")),
            dialect=dialect,
        )

    # -- what the template can do ------------------------------------------------------

    def _found_dialect(self) -> Dialect:
        source = "\n".join(template.source for template in self._templates.values())
        if "[TOOL_CALLS]" in source:
            return "mistral"
        if "<tool_call>" in source:
            return "hermes"
        if "ipython" in source or "<|python_tag|>" in source:
            return "llama3"
        return "hermes"

    @property
    def prompt_format(self) -> PromptFormat:
        """The rules of conversion."""
        return TEMPLATE_FORMAT

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template itself tells the model of tools."""
        if "tool_use" in self._templates:
            return True
        function = {"name": "qzx_probe", "description": "", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        messages = [{"role": "user", "content": "x"}]
        try:
            return "qzx_probe" in self._run(messages, tools=tools, thinking=False)
        except (TemplateRefusedError, TemplateUnusableError):
            return False

    @cached_property
    def thinks(self) -> bool:
        """Whether the model may think between tags before it answers."""
        source = self._default.source
        return _THINK_END in source or _THINK_START in self.special_tokens

    def opens_thinking(self, *, thinking: bool) -> bool:
        """Whether the prompt itself opens the thinking, so that answers begin inside it."""
        if thinking not in self._opens:
            prompt = self._run([{"role": "user", "content": "x"}], tools=None, thinking=thinking)
            self._opens[thinking] = prompt.rstrip().endswith(_THINK_START)
        return self._opens[thinking]

    @cached_property
    def _opens(self) -> dict[bool, bool]:
        return {}

    # -- rendering ---------------------------------------------------------------------

    def render(self, conversation: Conversation) -> RenderedPrompt:
        """The prompt that asks for the next assistant turn.

        Raises `ConversionError` with the template's own words where it refuses the conversation,
        `TemplateUnusableError` where it fails.
        """
        history = list(conversation.history)
        last = history[-1] if history else None
        begun = history.pop() if last is not None and last.prefix else None
        tools = None
        if conversation.has_tools and self.shows_tools:
            tools = [self._tool(tool) for tool in conversation.tools]
        notes = self._notes(conversation, lists_tools=conversation.has_tools and tools is None)
        messages = self._messages(history, notes)
        prompt = self._prompt(messages, tools, thinking=conversation.thinking_mode)
        if begun is not None:
            prompt += self._begun(begun, conversation, prompt)
        return self._ranged(prompt)

    def _prompt(self, messages: list[Any], tools: list[Any] | None, *, thinking: bool) -> str:
        refused: TemplateRefusedError | None = None
        for form in (messages, _alternating(messages)):
            try:
                return self._run(form, tools=tools, thinking=thinking)
            except TemplateRefusedError as error:
                refused = refused or error
        raise ConversionError(
            f"this model's chat template refuses the conversation: {refused}", param="messages"
        )

    def _run(self, messages: list[Any], *, tools: list[Any] | None, thinking: bool) -> str:
        template = self._templates.get("tool_use") if tools else None
        return (template or self._default).render(
            {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": True,
                "enable_thinking": thinking,
                "bos_token": self._bos,
                "eos_token": self._eos,
            }
        )

    def _begun(self, message: Message, conversation: Conversation, prompt: str) -> str:
        """The beginning of an answer that the model goes on with."""
        content = self._plain(message.content)
        if not conversation.thinking_mode:
            return content
        opened = "" if prompt.rstrip().endswith(_THINK_START) else f"{_THINK_START}\n"
        thoughts = self._plain(message.reasoning_content or "")
        if not content:
            return opened + thoughts
        return f"{opened}{thoughts}\n{_THINK_END}\n\n{content}"

    def _notes(self, conversation: Conversation, *, lists_tools: bool) -> list[str]:
        """What the template has no place for: it goes into the system message."""
        notes: list[str] = []
        if lists_tools:
            lines = [json.dumps(self._tool(t), ensure_ascii=False) for t in conversation.tools]
            notes.append(f"{_TOOLS_HEAD}{chr(10).join(lines)}{_TOOLS_TAIL}")
        if conversation.response_format == "json_object":
            notes.append(_JSON_NOTE)
        elif conversation.response_format == "json_schema":
            schema = json.dumps(conversation.response_schema, ensure_ascii=False)
            notes.append(_SCHEMA_NOTE + self._plain(schema))
        return notes

    def _messages(self, history: Sequence[Message], notes: list[str]) -> list[dict[str, Any]]:
        names: dict[str, str] = {}
        leading = [self._plain(m.content) for m in history if m.role == "system" and m.content]
        messages: list[dict[str, Any]] = []
        if leading or notes:
            messages.append({"role": "system", "content": "\n\n".join([*leading, *notes])})
        for message in history:
            if message.role == "system":
                continue
            for call in message.tool_calls or ():
                names[call.id] = call.name
            messages.append(self._message(message, names))
        return messages

    def _message(self, message: Message, names: Mapping[str, str]) -> dict[str, Any]:
        content = self._plain(message.content)
        if message.role == "tool":
            if not self.shows_tools:
                shown = f"<tool_response>\n{content}\n</tool_response>"
                return {"role": "user", "content": shown}
            call_id = message.tool_call_id or ""
            name = names.get(call_id, "")
            return {
                "role": "tool",
                "content": content,
                "tool_call_id": self._call_id(call_id),
                "name": self._plain(name),
            }
        if message.role != "assistant":
            return {"role": "user", "content": content}
        made: dict[str, Any] = {"role": "assistant", "content": content}
        if message.reasoning_content:
            made["reasoning_content"] = self._plain(message.reasoning_content)
        calls = message.tool_calls
        if calls and self.shows_tools:
            made["tool_calls"] = [self._call(call) for call in calls]
        elif calls:
            written = [
                "<tool_call>\n"
                + json.dumps(self._call(call)["function"], ensure_ascii=False)
                + "\n</tool_call>"
                for call in calls
            ]
            made["content"] = "\n".join([*([content] if content else []), *written])
        return made

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = parse_object(call.arguments)
        if arguments is None:
            arguments = {"arguments": call.arguments}
        function = {"name": self._plain(call.name), "arguments": self._plain_all(arguments)}
        return {"id": self._call_id(call.id), "type": "function", "function": function}

    def _call_id(self, call_id: str) -> str:
        if self.dialect != "mistral" or re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
            return self._plain(call_id)
        # Its templates take ids of this shape only.
        return hashlib.sha256(call_id.encode()).hexdigest()[:_MISTRAL_ID_CHARS]

    def _tool(self, tool: Any) -> dict[str, Any]:
        function = {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": self._plain_all(function)}

    # -- special tokens ----------------------------------------------------------------

    def _plain(self, text: str) -> str:
        """Text whose spellings of special tokens are broken."""
        if _BREAK in text:
            text = text.replace(_BREAK, "\ufffd")
        if self._specials is None:
            return text
        return self._specials.sub(lambda found: _broken(found.group()), text)

    def _plain_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._plain(value)
        if isinstance(value, dict):
            return {self._plain(str(key)): self._plain_all(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._plain_all(one) for one in value]
        return value

    def _ranged(self, prompt: str) -> RenderedPrompt:
        """The prompt without the breaks, and where its special tokens lie."""
        prompt = prompt.replace(_ESCAPED_BREAK, _BREAK)
        ranges: list[tuple[int, int]] = []
        if self._specials is not None:
            breaks = 0
            position = 0
            for found in self._specials.finditer(prompt):
                breaks += prompt.count(_BREAK, position, found.start())
                position = found.start()
                ranges.append((found.start() - breaks, found.end() - breaks))
        return RenderedPrompt(prompt.replace(_BREAK, ""), ranges, [])


TargetModel: TypeAlias = ModelVersion | TemplateModel
"""What a conversation is converted for."""


def _broken(token: str) -> str:
    return token[0] + _BREAK + token[1:]


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for templates that want user and assistant in turn, and no system message."""
    out: list[dict[str, Any]] = []
    system = ""
    for message in messages:
        message = dict(message)
        if message["role"] == "system":
            system = message["content"]
            continue
        if system and message["role"] == "user":
            message["content"] = f"{system}\n\n{message['content']}"
            system = ""
        before = out[-1] if out else None
        joins = before is not None and before["role"] == message["role"] != "tool"
        if joins and before is not None and "tool_calls" not in before:
            before["content"] = f"{before['content']}\n\n{message['content']}"
            if "tool_calls" in message:
                before["tool_calls"] = message["tool_calls"]
        else:
            out.append(message)
    if system:
        out.insert(0, {"role": "user", "content": system})
    return out


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TemplateUnusableError(f"cannot read {path}: {error}") from None
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
