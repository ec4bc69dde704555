"""Kept runs of a page tree as CommonMark with GFM tables; the same tree gives the same bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from lxml import html

from deepinfer_search_fetch.extract.inline import (
    InlineWriter,
    WriterOptions,
    code_span,
    escape_line_starts,
)
from deepinfer_search_fetch.extract.tables import build_grid, is_data_table, rows_of, to_markdown
from deepinfer_search_fetch.extract.tree import Box, InlineItem, PageTree, Run

_HEADING = re.compile(r"h[1-6]")
_LANGUAGE = re.compile(
    r"(?:^|\s)(?:language-|lang-|highlight-source-|brush:\s*|sourceCode\s+|highlight-)"
    r"([A-Za-z0-9+#_.-]{1,30})"
)
_HIGHLIGHTER = re.compile(r"(?:^|\s)hljs(?:\s|$)")
_NO_LANGUAGE = frozenset(
    {"none", "plaintext", "text", "plain", "default", "nohighlight", "notranslate", "hljs"}
)
_GUTTER = re.compile(r"(?:^|[\s_-])(?:lineno|linenos|line-?numbers?|gutter|ln-num)", re.I)
_NOTE_TEXT = re.compile(r"\[\^\d{1,3}\]: ")
_MARGINS = frozenset({"nav", "header", "footer", "aside", "form"})
_NOTE_NUMBER = re.compile(r"\[?(\d{1,3})\]?")


def write_markdown(page: PageTree, options: WriterOptions) -> str:
    """Markdown of all kept runs, "" if there is none; ends with one line feed."""
    count_kept(page)
    writer = _Writer(options, _footnotes(page))
    blocks = writer.box(page.root, None)
    text = "\n\n".join(b.strip("\n") for b in blocks if b.strip())
    return text + "\n" if text else ""


def count_kept(page: PageTree) -> None:
    """Bring `Box.kept_runs` up to date with the runs' `kept`."""
    stack: list[Box] = [page.root]
    while stack:
        box = stack.pop()
        box.kept_runs = 0
        stack += [c for c in box.children if isinstance(c, Box)]
    for run in page.runs:
        box_up: Box | None = run.box if run.kept else None
        while box_up is not None:
            box_up.kept_runs += 1
            box_up = box_up.parent


def _footnotes(page: PageTree) -> dict[str, str]:
    """Footnote text id -> number, where a numeric reference and its target both exist."""
    root = page.root.element
    numbers: dict[str, str] = {}
    for anchor in root.iter("a"):
        href = anchor.get("href") or ""
        if href.startswith("#") and len(href) > 1:
            number = _NOTE_NUMBER.fullmatch("".join(anchor.itertext()).strip())
            if number:
                numbers.setdefault(href[1:], number.group(1))
    if not numbers:
        return {}
    kept_ids = {
        identifier
        for run in page.runs
        if run.kept
        for box in (run.box, run.box.parent)
        if box is not None
        and box.tag in ("li", "p", "div")
        and (identifier := box.element.get("id"))
    }
    # A number two texts claim would merge two footnotes into one.
    claimed = Counter(numbers[i] for i in kept_ids & numbers.keys())
    return {i: n for i, n in numbers.items() if i in kept_ids and claimed[n] == 1}


class _Writer:
    def __init__(self, options: WriterOptions, notes: dict[str, str]) -> None:
        self._options = options
        self._inline = InlineWriter(options, notes)
        self._notes = notes

    def box(self, box: Box, href: str | None) -> list[str]:
        """The blocks of one box."""
        if box.kept_runs == 0:
            return []
        tag = box.tag
        if tag == "a":
            href = box.element.get("href")
        if _HEADING.fullmatch(tag):
            return self._heading(box, int(tag[1]), href)
        if tag in ("ul", "ol", "menu", "dir"):
            return self._list(box, href)
        if tag == "dl":
            return self._definitions(box, href)
        if tag == "pre":
            return [self._code(box)]
        if tag == "blockquote":
            return [_prefix("\n\n".join(self._children(box, href)), "> ", "> ")]
        if tag == "table":
            return self._table(box, href)
        if tag == "figcaption":
            return [
                f"*{b}*" if b and not re.search(r"[*\n]", b) else b
                for b in self._children(box, href)
            ]
        return self._noted(box, self._children(box, href))

    def _children(self, box: Box, href: str | None) -> list[str]:
        blocks: list[str] = []
        pictures = self._pictures(box)
        for child in box.children:
            if isinstance(child, Box):
                if child in pictures:
                    blocks.append(pictures[child])
                elif child.tag == "li":
                    # An item without its list: keep it an item.
                    blocks += self._items([child], href, ordered=False, start=1)
                else:
                    blocks += self.box(child, href)
            elif child.kept:
                text = self._run(child, href)
                if text:
                    blocks.append(text)
        return blocks

    def _pictures(self, box: Box) -> dict[Box, str]:
        """Blocks that hold a picture and no text, between two children of `box` that are kept."""
        if self._options.images != "url":
            return {}
        kept = [
            i for i, c in enumerate(box.children) if (c.kept_runs if isinstance(c, Box) else c.kept)
        ]
        if len(kept) < 2:
            return {}
        between = box.children[kept[0] : kept[-1]]
        found: dict[Box, str] = {}
        for child in between:
            if isinstance(child, Box) and not child.kept_runs and _only_pictures(child):
                images: list[InlineItem] = list(child.element.iter("img"))
                if text := self._inline.render(images, None):
                    found[child] = text
        return found

    def _run(self, run: Run, href: str | None) -> str:
        return escape_line_starts(self._inline.render(run.items, href))

    def _heading(self, box: Box, level: int, href: str | None) -> list[str]:
        # A heading that holds blocks (some sites wrap a whole card in one) is split into them.
        texts = [b.replace("\n", " ") for b in self._children(box, href)]
        if not texts:
            return []
        return [f"{'#' * level} {texts[0]}", *texts[1:]]

    def _list(self, box: Box, href: str | None) -> list[str]:
        ordered = box.tag == "ol"
        down = ordered and "reversed" in box.element.attrib
        count = sum(isinstance(c, Box) and c.tag == "li" for c in box.children)
        start = box.element.get("start") or str(count if down else 1)
        first = int(start) if re.fullmatch(r"\d{1,9}", start) else 1
        out: list[str] = []
        items: list[Box] = []
        for child in box.children:
            if isinstance(child, Box) and child.tag in ("ul", "ol") and items:
                # A list put beside its item instead of inside it belongs to that item.
                items[-1].children.append(child)
                items[-1].kept_runs += child.kept_runs
            elif isinstance(child, Box):
                items.append(child)
            elif child.kept and child.text:
                out.append(self._run(child, href))
        return out + self._items(items, href, ordered=ordered, start=first, step=-1 if down else 1)

    def _items(
        self, items: Iterable[Box], href: str | None, *, ordered: bool, start: int, step: int = 1
    ) -> list[str]:
        rendered: list[list[str]] = []
        numbers: list[int] = []
        number = start
        for item in items:
            value = item.element.get("value") or ""
            if ordered and re.fullmatch(r"\d{1,9}", value):
                number = int(value)
            blocks = self._item_blocks(item, href)
            if blocks:
                rendered.append(blocks)
                numbers.append(number)
            number += step
        if not rendered:
            return []
        if all(_NOTE_TEXT.match(blocks[0]) for blocks in rendered):
            return [
                b
                for blocks in rendered
                for b in (blocks[0], *(_prefix(x, "    ", "    ") for x in blocks[1:]))
            ]
        loose = any(sum(not _is_list(b) for b in blocks) > 1 for blocks in rendered)
        lines: list[str] = []
        for blocks, n in zip(rendered, numbers, strict=True):
            marker = f"{n}. " if ordered else "- "
            body = ("\n\n" if loose else "\n").join(blocks)
            lines.append(_prefix(body, marker, " " * len(marker)))
        return [("\n\n" if loose else "\n").join(lines)]

    def _item_blocks(self, item: Box, href: str | None) -> list[str]:
        if item.kept_runs == 0:
            return []
        if item.tag != "li":
            return self.box(item, href)
        return self._noted(item, self._children(item, href))

    def _noted(self, box: Box, blocks: list[str]) -> list[str]:
        number = self._notes.get(box.element.get("id") or "") if self._notes else None
        if number and blocks:
            return [f"[^{number}]: {blocks[0]}", *blocks[1:]]
        return blocks

    def _definitions(self, box: Box, href: str | None) -> list[str]:
        out: list[str] = []
        for child in box.children:
            if not isinstance(child, Box):
                if child.kept and child.text:
                    out.append(self._run(child, href))
                continue
            if child.tag == "div":  # HTML allows groups of dt/dd in a div
                out += self._definitions(child, href)
                continue
            blocks = self.box(child, href)
            if child.tag == "dt":
                out += [b if "**" in b or "\n" in b else f"**{b}**" for b in blocks]
            elif child.tag == "dd" and blocks and out:
                out[-1] += "\n" + _prefix(blocks[0], "  ", "  ")
                out += [_prefix(b, "  ", "  ") for b in blocks[1:]]
            else:
                out += blocks
        return out

    def _code(self, box: Box) -> str:
        text = _code_text(box.element).strip("\n")
        longest = max((len(m) for m in re.findall(r"`{3,}", text)), default=2)
        fence = "`" * (longest + 1)
        body = "\n".join(line.rstrip() for line in text.split("\n"))
        return f"{fence}{_code_language(box.element)}\n{body}\n{fence}"

    def _table(self, box: Box, href: str | None) -> list[str]:
        if not self._options.tables:
            return []
        if not is_data_table(box):
            return self._children(box, href)
        caption = [
            block
            for child in box.children
            if isinstance(child, Box) and child.tag == "caption"
            for block in self.box(child, href)
        ]
        grid = build_grid(box, lambda cell: self._cell(cell, href))
        return [*caption, to_markdown(grid)] if any(any(r) for r in grid.rows) else caption

    def _cell(self, cell: Box, href: str | None) -> str:
        parts: list[str] = []
        for child in cell.children:
            if isinstance(child, Run):
                if child.kept and child.text:
                    parts.append(self._inline.render(child.items, href))
            elif child.tag in ("ul", "ol", "table"):
                inner = rows_of(child) if child.tag == "table" else child.children
                texts = [self._cell(i, href) for i in inner if isinstance(i, Box)]
                parts.append("; ".join(t for t in texts if t))
            elif child.tag == "pre" and child.kept_runs:
                lines = _code_text(child.element).strip("\n").split("\n")
                parts += [code_span(line) for line in lines]
            elif child.kept_runs:
                parts.append(
                    self._cell(child, child.element.get("href") if child.tag == "a" else href)
                )
        between = " " if cell.tag == "tr" else "<br>"
        text = between.join(p for p in parts if p).replace("\n", "<br>")
        return re.sub(r"(?<!\\)\|", r"\\|", text)


def _only_pictures(box: Box) -> bool:
    """Whether a block has no text at all, kept or not, and is none of a page's margins."""
    stack: list[Box | Run] = [box]
    while stack:
        current = stack.pop()
        if isinstance(current, Run) or current.tag in _MARGINS:
            return False
        stack += current.children
    return True


def _code_text(element: html.HtmlElement) -> str:
    out: list[str] = []

    def walk(node: html.HtmlElement) -> None:
        out.append(node.text or "")
        for child in node:
            classes = child.get("class") or "" if isinstance(child.tag, str) else ""
            if child.tag == "br":
                out.append("\n")
            elif (
                isinstance(child.tag, str) and child.tag != "button" and not _GUTTER.search(classes)
            ):
                if (
                    child.tag in ("div", "p", "li", "tr")
                    and out
                    and not "".join(out[-2:]).endswith("\n")
                ):
                    out.append("\n")
                walk(child)
            out.append(child.tail or "")

    walk(element)
    return "".join(out).replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")


def _code_language(pre: html.HtmlElement) -> str:
    """From the class of <pre>, of its <code>, or of up to two wrappers."""
    nodes = [pre, *pre.iter("code")]
    parent = pre.getparent()
    for _ in range(2):
        if parent is None or parent.tag == "body":
            break
        nodes.append(parent)
        parent = parent.getparent()
    for node in nodes:
        explicit = node.get("data-lang") or node.get("data-language") or node.get("lang-name")
        classes = node.get("class") or ""
        match = _LANGUAGE.search(classes)
        name = explicit or (match.group(1) if match else "")
        if not name and _HIGHLIGHTER.search(classes):
            name = next((c for c in classes.split() if c.lower() not in _NO_LANGUAGE), "")
        if name and name.lower() not in _NO_LANGUAGE and re.fullmatch(r"[\w+#.-]{1,30}", name):
            return name.lower()
    return ""


def _is_list(block: str) -> bool:
    return bool(re.match(r"(?:- |\d{1,9}\. )", block))


def _prefix(text: str, first: str, rest: str) -> str:
    """`first` before the first line, `rest` before the others; no line ends with a blank."""
    lines = text.split("\n")
    return "\n".join(
        (first if i == 0 else rest) + line if line else (first if i == 0 else rest).rstrip()
        for i, line in enumerate(lines)
    )
