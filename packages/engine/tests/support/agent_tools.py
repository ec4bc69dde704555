"""Tools of the kinds and sizes that a coding agent sends with every request: 24 of them."""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {"type": "string"}
FLAG: dict[str, Any] = {"type": "boolean"}
SAFE = {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}
RECORD = {"type": "object", "propertyNames": TEXT, "additionalProperties": {}}
FINDING = {
    "type": "object",
    "properties": {"file": TEXT, "line": SAFE, "summary": TEXT, "kind": {"enum": ["bug", "style"]}},
    "required": ["file", "summary"],
    "additionalProperties": False,
}
WORDS = {"type": "array", "items": TEXT}
TOOLS: dict[str, dict[str, Any]] = {
    "agent": {"prompt": TEXT, "title": TEXT, "model": {"enum": ["small", "large"]}, "alone": FLAG},
    "shell": {"command": TEXT, "timeout": {"type": "number"}, "title": TEXT, "background": FLAG},
    "schedule": {"cron": TEXT, "prompt": TEXT, "again": FLAG, "kept": FLAG},
    "unschedule": {"id": TEXT},
    "schedules": {},
    "edit": {"path": TEXT, "old": TEXT, "new": TEXT, "all": FLAG},
    "read": {"path": TEXT, "offset": {"type": "integer", "minimum": 0}, "limit": SAFE},
    "write": {"path": TEXT, "content": TEXT},
    "glob": {"pattern": TEXT, "path": TEXT},
    "grep": {"pattern": TEXT, "glob": TEXT, "-A": {"type": "number"}, "-i": FLAG, "mode": TEXT},
    "report": {"level": {"enum": ["low", "high"]}, "findings": {
        "type": "array", "maxItems": 32, "items": FINDING}},
    "ask": {"question": TEXT, "options": {"type": "array", "minItems": 2, "maxItems": 4, "items": {
        "type": "object", "properties": {"label": TEXT, "value": TEXT}, "required": ["label"]}}},
    "plan": {"plan": TEXT, "steps": WORDS},
    "notebook": {"path": TEXT, "cell": {"type": "integer"}, "source": TEXT},
    "task": {"subject": TEXT, "description": TEXT, "metadata": RECORD},
    "task_get": {"id": TEXT},
    "task_list": {},
    "task_output": {"id": TEXT, "wait": FLAG, "timeout": {"type": "number", "minimum": 0}},
    "task_stop": {"id": TEXT},
    "task_update": {"id": TEXT, "status": {"anyOf": [
        {"enum": ["pending", "done"]}, {"const": "deleted"}]}, "blocks": WORDS, "more": RECORD},
    "fetch": {"url": {"type": "string", "format": "uri"}, "prompt": TEXT},
    "search": {"query": {"type": "string", "minLength": 2}, "allowed": WORDS, "blocked": WORDS},
    "workflow": {"script": {"type": "string", "maxLength": 524288}, "args": {}, "run": {
        "type": "string", "pattern": "^wf_[a-z0-9-]{6,}$"}},
    "skill": {"name": TEXT, "args": TEXT},
}  # fmt: skip
