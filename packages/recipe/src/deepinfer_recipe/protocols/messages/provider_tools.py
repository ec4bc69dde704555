"""Client tools whose schema the provider defines: a request names the type, the client runs them.

`bash`, the text editor, the memory folder and the computer: the model sees an ordinary function,
its call comes back as an ordinary `tool_use` block. The texts and schemas are this project's own
wording of what the public documentation says these tools take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT: dict[str, Any] = {"type": "string"}
_LINE: dict[str, Any] = {"type": "integer"}
_RANGE: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_POINT: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _one_of(*commands: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(commands)}


_BASH = (
    "Run a command in a shell that keeps its state between calls. `restart` opens a new shell.",
    _object([], command=_TEXT, restart={"type": "boolean"}),
)
_EDITOR = (
    "View, create and edit text files. `view` shows a file (lines `view_range`) or a folder; "
    "`create` writes `file_text`; `str_replace` replaces the one occurrence of `old_str` by "
    "`new_str`; `insert` puts text behind line `insert_line`.",
    _object(
        ["command", "path"],
        command=_one_of("view", "create", "str_replace", "insert", "undo_edit"),
        path=_TEXT,
        file_text=_TEXT,
        old_str=_TEXT,
        new_str=_TEXT,
        insert_line=_LINE,
        insert_text=_TEXT,
        view_range=_RANGE,
    ),
)
_MEMORY = (
    "Read and change the files of a memory folder that outlives the conversation; paths begin "
    "with /memories.",
    _object(
        ["command"],
        command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
        path=_TEXT,
        view_range=_RANGE,
        file_text=_TEXT,
        old_str=_TEXT,
        new_str=_TEXT,
        insert_line=_LINE,
        insert_text=_TEXT,
        old_path=_TEXT,
        new_path=_TEXT,
    ),
)
_COMPUTER = (
    "Use the mouse, keyboard and screen of a computer. Coordinates are pixels from the upper "
    "left corner.",
    _object(
        ["action"],
        action=_one_of(
            *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click"),
            *("middle_click", "double_click", "triple_click", "screenshot", "cursor_position"),
            *("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "zoom"),
        ),
        coordinate=_POINT,
        start_coordinate=_POINT,
        region=_POINT,
        text=_TEXT,
        scroll_direction=_one_of("up", "down", "left", "right"),
        scroll_amount=_LINE,
        duration={"type": "number"},
    ),
)
_KINDS = {"bash_": _BASH, "text_editor_": _EDITOR, "memory_": _MEMORY, "computer_": _COMPUTER}


def provider_tool(kind: str, declared: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Description and schema of a tool type such as `bash_20250124`; None for other types."""
    found = next((tool for prefix, tool in _KINDS.items() if kind.startswith(prefix)), None)
    if found is None:
        return None
    description, schema = found
    width, height = declared.get("display_width_px"), declared.get("display_height_px")
    if isinstance(width, int) and isinstance(height, int):
        description += f" The screen has {width} x {height} pixels."
    return description, schema
