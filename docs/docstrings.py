"""Docstrings as pages: runs of `name: text` lines become lists.

The sources describe arguments as aligned lines, which Markdown would run together.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ITEM = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*)(?::|\s{2,}:?)\s+(\S.*)$")


def as_lists(text: str) -> str:
    """Paragraphs of two or more `name: text` lines, or one behind a blank line, as lists.

    A tree that is drawn becomes a block of text.
    """
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if "├──" in paragraph:  # a tree that is drawn
            narrow = re.sub(r"(?<=\w) {2,}", "  ", paragraph)
            out.append(f"```text\n{narrow}\n```")
            continue
        lines = paragraph.split("\n")
        items: list[list[str]] = []
        head: list[str] = []
        for line in lines:
            found = ITEM.match(line)
            if found:
                items.append([found.group(1), found.group(2)])
            elif items and line.startswith(" "):
                items[-1][1] += " " + line.strip()
            elif items:
                break
            else:
                head.append(line)
        else:
            sentence = len(items) == 1 and items[0][0][0].isupper()  # "Forget: a slot was ..."
            if items and (len(items) > 1 or not head) and not sentence:
                listed = "\n".join(f"- `{name}`: {told}" for name, told in items)
                out.append("\n".join(head) + ("\n\n" if head else "") + listed)
                continue
        out.append(paragraph)
    return "\n\n".join(out)


class Lists(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Once for each object that has one."""
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)
