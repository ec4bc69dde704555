"""Small repairs of the model's choice that keep structure whole: headings, lists, captions, gaps.

The model decides run by run. A heading above text that stays, the one item of a list it was unsure
about, or a formula between two kept paragraphs belong to what stays around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepinfer_search_fetch.extract.layout import Floats
from deepinfer_search_fetch.extract.tree import Box, PageTree, Run
from deepinfer_search_fetch.extract.wording import is_furniture

Kept = NDArray[np.bool_]

_MIN_HEADING_ODDS = 0.02
_MIN_LIST_ODDS = 0.15
_MIN_GAP_ODDS = 0.1
_MAX_GAP_RUNS = 8
_LIST_MAJORITY = 0.5
_MAX_LINK_LIST_CHARS = 400
_MIN_LINK_LIST_ODDS = 0.05
_PROSE_CHARS = 80
_LINKED = 0.5
_LISTS = frozenset({"ul", "ol", "dl"})
_CAPTIONS = frozenset({"caption", "summary"})
_GAP_TAGS = frozenset({"p", "pre", "li", "div", "dt", "dd", "td", "th", "label", "figcaption"})
_CONTROLS = frozenset({"button", "select", "option"})


def repair(page: PageTree, kept: Kept, odds: Floats, sizes: Floats) -> Kept:
    """A copy of `kept` with the repairs made; odds, sizes: float64 [runs], the words of each."""
    out = kept.copy()
    if not out.any():
        return out
    for step in (_fill_lists, _fill_gaps, _fill_link_lists, _keep_headings, _keep_captions):
        step(page.runs, out, odds, sizes)
    return out


Step = Callable[[Sequence[Run], Kept, Floats, Floats], None]


def _fill_lists(runs: Sequence[Run], kept: Kept, odds: Floats, sizes: Floats) -> None:
    """A list most of whose words stay, and that is no menu, stays whole."""
    for first, last in _stretches(runs, _LISTS):
        part = slice(first, last)
        weight = sizes[part].sum()
        if weight and (sizes[part] * kept[part]).sum() >= _LIST_MAJORITY * weight:
            kept[part] |= odds[part] >= _MIN_LIST_ODDS


def _fill_gaps(runs: Sequence[Run], kept: Kept, odds: Floats, sizes: Floats) -> None:
    """A few runs between two kept ones of the same container, where none is mostly links."""
    chosen = np.flatnonzero(kept).tolist()
    for left, right in pairwise(chosen):
        if not 1 < right - left <= _MAX_GAP_RUNS + 1:
            continue
        container = runs[left].box.parent
        between = [i for i in range(left + 1, right) if runs[i].tag not in _CONTROLS]
        if runs[right].box.parent is not container or runs[left].tag == "h1":
            continue  # what follows the title is who wrote it, and when
        if all(
            _below(runs[i].box, container)
            and not is_furniture(runs[i].text)
            and (runs[i].tag in _GAP_TAGS or runs[i].box is container)
            and runs[i].link_chars <= _LINKED * len(runs[i].text)
            and odds[i] >= _MIN_GAP_ODDS
            for i in between
        ):
            kept[between] = True


def _fill_link_lists(runs: Sequence[Run], kept: Kept, odds: Floats, sizes: Floats) -> None:
    """Short lists of links between two kept blocks of the same container belong to the text: they
    are no menu, which stands at the edge of it."""
    chosen = np.flatnonzero(kept).tolist()
    for left, right in pairwise(chosen):
        if not 1 < right - left <= _MAX_GAP_RUNS + 1:
            continue
        between = range(left + 1, right)
        lists = {_outermost(runs[i].box, _LISTS) for i in between}
        containers = {None if found is None else found.parent for found in lists}
        if len(containers) != 1 or (container := containers.pop()) is None:
            continue
        if (
            _below(runs[left].box, container)
            and _below(runs[right].box, container)
            and _is_prose(runs[right])
            and 2 * sum(is_furniture(runs[i].text) for i in between) < len(between)
            and sum(len(runs[i].text) for i in between) <= _MAX_LINK_LIST_CHARS
            and float(odds[left + 1 : right].mean()) >= _MIN_LINK_LIST_ODDS
        ):
            kept[left + 1 : right] = True


def _is_prose(run: Run) -> bool:
    return len(run.text) >= _PROSE_CHARS and run.link_chars <= _LINKED * len(run.text)


def _keep_headings(runs: Sequence[Run], kept: Kept, odds: Floats, sizes: Floats) -> None:
    """h2 to h6 whose next run stays, from below upwards, so that nested headings follow; and the
    page's only h1 where it stands beside the first run that stays."""
    for i in range(len(runs) - 2, -1, -1):
        if not kept[i] and kept[i + 1] and _heading_level(runs[i].box) > 1:
            kept[i] = odds[i] >= _MIN_HEADING_ODDS
    titles = [i for i, run in enumerate(runs) if _heading_level(run.box) == 1]
    first = int(np.flatnonzero(kept)[0])
    if titles == [first - 1] and runs[first - 1].box.parent is runs[first].box.parent:
        kept[first - 1] = odds[first - 1] >= _MIN_HEADING_ODDS


def _keep_captions(runs: Sequence[Run], kept: Kept, odds: Floats, sizes: Floats) -> None:
    """The caption of a kept table, the summary of kept details."""
    for i in range(len(runs) - 1):
        if runs[i].tag in _CAPTIONS and kept[i + 1]:
            kept[i] = True


def _stretches(runs: Sequence[Run], tags: frozenset[str]) -> Iterator[tuple[int, int]]:
    """First run and end of every outermost box with one of `tags`."""
    current: Box | None = None
    start = 0
    for i, run in enumerate(runs):
        box = _outermost(run.box, tags)
        if box is not current:
            if current is not None:
                yield start, i
            current, start = box, i
    if current is not None:
        yield start, len(runs)


def _outermost(box: Box | None, tags: frozenset[str]) -> Box | None:
    found: Box | None = None
    while box is not None:
        if box.tag in tags:
            found = box
        box = box.parent
    return found


def _below(box: Box | None, container: Box | None) -> bool:
    while box is not None:
        if box is container:
            return True
        box = box.parent
    return False


def _heading_level(box: Box) -> int:
    """1 to 6 in a heading or in a block (often a button) that is all of one, else 0."""
    for tag in (box.tag, box.parent.tag if box.parent is not None else ""):
        if len(tag) == 2 and tag[0] == "h" and tag[1].isdigit():
            return int(tag[1])
    return 0
