"""Numbers that describe a run for the keep/drop model: text, links, place, container, neighbours.

No feature knows the page's URL, host or vocabulary beyond a few kinds of words every site shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from deepinfer_search_fetch.extract import wording
from deepinfer_search_fetch.extract.hints import SEMANTIC, context_columns, far_hint, in_comments
from deepinfer_search_fetch.extract.layout import Floats, Ints, Layout, lay_out
from deepinfer_search_fetch.extract.tree import Box, PageTree, Run
from deepinfer_search_fetch.extract.voters import CHAIN, shifted, voter_columns, window

_TAG_GROUPS: tuple[frozenset[str], ...] = (
    frozenset({"p"}),
    frozenset({"h1", "h2"}),
    frozenset({"h3", "h4", "h5", "h6"}),
    frozenset({"li"}),
    frozenset({"td", "th"}),
    frozenset({"pre"}),
    frozenset({"div", "section", "article", "body"}),
    frozenset({"button", "label", "option", "select", "summary", "legend"}),
    frozenset({"figcaption", "caption"}),
    frozenset({"blockquote", "dd", "dt"}),
)
_KINDS = {tag: [tag in group for group in _TAG_GROUPS] for group in _TAG_GROUPS for tag in group}
_NO_KIND = [False] * len(_TAG_GROUPS)
_TAIL_CHARS = 60
_TAIL_WORDS = 7
_EMPHASIS = frozenset({"b", "strong", "em"})
_PROSE_CHARS = 80
_FAR = 30.0


def run_features(
    page: PageTree,
    run_words: Sequence[list[str]],
    votes: Sequence[Sequence[float]],
    title: str,
    type_flags: Sequence[float],
) -> tuple[Floats, Floats]:
    """float64 [runs, features], and the page's own float64 row, which every run's row ends with.

    run_words: words of every run. votes: per voter one number 0..1 per run (`candidates.votes`).
    type_flags: `Metadata.type_flags` of the page.
    """
    runs = page.runs
    n = len(runs)
    layout = lay_out(runs)
    chain = layout.ancestors(CHAIN)
    chars = np.array([max(len(r.text), 1) for r in runs], dtype=np.float64)
    links = np.array([r.link_chars for r in runs], dtype=np.float64)
    sentences = np.array(
        [len(wording.SENTENCE_END.findall(r.text)) for r in runs], dtype=np.float64
    )
    tails = [
        (len(r.text) <= _TAIL_CHARS or len(w) <= _TAIL_WORDS)
        and wording.ends_content(wording.folded(r.text))
        for r, w in zip(runs, run_words, strict=True)
    ]
    opinions = [np.array(v, dtype=np.float64) for v in votes]
    contexts = context_columns(layout)
    local = _local_columns(runs, run_words, sentences, tails, layout, title)
    headings = np.array([_is_heading(r) for r in runs], dtype=np.float64)
    prose = (chars >= _PROSE_CHARS).astype(np.float64)
    link_share = links / chars
    readers = in_comments(runs).astype(np.float64)

    at = np.arange(n, dtype=np.float64)
    totals = layout.below(np.stack([np.ones(n), chars, links, prose, sentences], axis=1))
    of_box = np.stack(
        [
            np.log1p(totals[:, 0]),
            totals[:, 1] / chars.sum(),
            totals[:, 2] / np.maximum(totals[:, 1], 1),
            totals[:, 3] / totals[:, 0],
            totals[:, 4] / totals[:, 0],
        ],
        axis=1,
    )
    columns: list[Floats] = [
        (np.cumsum(chars) - chars) / chars.sum(),
        at / n,
        layout.depth[layout.box_of].astype(np.float64),
        readers,
        np.full(n, float((readers * chars).sum() / chars.sum())),
        *_heading_columns(runs, headings, tails, chars, prose, link_share, title),
        *(shifted(local[:, 0], o) for o in (-3, -2, -1, 1, 2, 3)),
        *(shifted(link_share, o, 0.0) for o in (-3, -2, -1, 1, 2, 3)),
        *(shifted(headings, o, 0.0) for o in (-2, -1, 1, 2)),
    ]
    for vote in opinions:
        columns += voter_columns(vote, chars, layout, chain)
    page_row = _page_row(runs, chars, links, contexts[layout.box_of], opinions, type_flags)
    rows = np.concatenate(
        [
            local,
            np.stack(columns, axis=1),
            contexts[layout.box_of],
            *(of_box[boxes] for boxes in chain),
            np.tile(page_row, (n, 1)),
        ],
        axis=1,
    )
    return rows, page_row


def _local_columns(
    runs: Sequence[Run],
    run_words: Sequence[list[str]],
    sentences: Floats,
    tails: Sequence[bool],
    layout: Layout,
    title: str,
) -> Floats:
    """What a run says by itself, and how often the page repeats it or its kind."""
    signatures = _signatures(layout)
    repeats = Counter(signatures[b] for b in layout.box_of.tolist())
    seen: Counter[str] = Counter(r.text for r in runs)
    title_words = set(title.lower().split())
    rows: list[list[float]] = []
    for run, words_here, stops, tail, b in zip(
        runs, run_words, sentences.tolist(), tails, layout.box_of.tolist(), strict=True
    ):
        text = run.text
        head = text[:400]
        low = wording.folded(head)
        size = max(len(text), 1)
        sample = max(len(head), 1)
        count = max(len(words_here), 1)
        shared = len(title_words.intersection(words_here))
        digits = len(wording.DIGIT.findall(head))
        inside = [item.tag for item in run.items if not isinstance(item, str)]
        rows.append(
            [
                len(words_here),
                size,
                run.link_chars / size,
                stops / count * 10,
                min(stops, 10.0),
                wording.SENTENCE_END.search(text[-3:]) is not None,
                text.count(",") / size * 100,
                digits / sample,
                len(wording.UPPER.findall(head)) / sample,
                len(wording.CAPITALISED.findall(head)) / min(count, sample),
                wording.is_boilerplate(low),
                wording.has_date(low[:200]),
                digits > 0 and wording.has_price(text[:200]),
                wording.is_credit(low),
                tail and len(words_here) <= _TAIL_WORDS,
                seen[text],
                repeats[signatures[b]],
                shared / count,
                shared / max(len(title_words), 1),
                text.endswith(":"),
                text.endswith(("…", "...")),
                text[:1].islower(),
                not _EMPHASIS.isdisjoint(inside),
                inside.count("a"),
            ]
        )
    out = np.array(rows, dtype=np.float64)
    for column in (0, 1, 16, 23):  # words, characters, repeats, links: counts of any size
        out[:, column] = np.log1p(out[:, column])
    kinds = np.array([_KINDS.get(r.tag, _NO_KIND) for r in runs], dtype=np.float64)
    return np.concatenate([out, kinds], axis=1)


def _heading_columns(
    runs: Sequence[Run],
    headings: Floats,
    ends: Sequence[bool],
    chars: Floats,
    prose: Floats,
    link_share: Floats,
    title: str,
) -> list[Floats]:
    """Place relative to headings: the first h1, the page's title, the last heading, a tail mark."""
    n = len(runs)
    at = np.arange(n)
    first_h1 = next((i for i, r in enumerate(runs) if r.tag == "h1"), -1)
    wanted = title.casefold()
    titled = next(
        (i for i, r in enumerate(runs) if headings[i] and wanted and r.text.casefold() in wanted),
        -1,
    )
    tails = np.array(
        [end and len(r.text) <= _TAIL_CHARS for r, end in zip(runs, ends, strict=True)],
        dtype=np.float64,
    )
    tail_heading = tails * headings
    under_tail = np.zeros(n)
    state = 0.0
    for i in range(n):
        if headings[i]:
            state = tail_heading[i]
        under_tail[i] = state
    ahead_chars = window(chars * (1 - link_share), 4)
    return [
        _since(headings > 0, at),
        _since(tails > 0, at),
        under_tail,
        tails,
        np.clip(at - first_h1, -50, 200).astype(np.float64) if first_h1 >= 0 else np.full(n, -51.0),
        np.clip(at - titled, -50, 200).astype(np.float64) if titled >= 0 else np.full(n, -51.0),
        np.array([float(r.tag[1]) if h else 0.0 for r, h in zip(runs, headings, strict=True)]),
        np.log1p(ahead_chars),
        window(prose, 4),
        window(link_share, 4),
        window(link_share, 12),
    ]


def _since(marks: np.ndarray[tuple[int], np.dtype[np.bool_]], at: Ints) -> Floats:
    """Runs since the last marked one, at most _FAR."""
    last = np.maximum.accumulate(np.where(marks, at, -10_000))
    return np.minimum(at - last, _FAR).astype(np.float64)


def _page_row(
    runs: Sequence[Run],
    chars: Floats,
    links: Floats,
    contexts: Floats,
    opinions: Sequence[Floats],
    type_flags: Sequence[float],
) -> Floats:
    n = len(runs)
    total = chars.sum()
    common = np.minimum.reduce(list(opinions))
    code = np.array([r.tag == "pre" for r in runs], dtype=np.float64)
    prices = sum(wording.has_price(r.text) for r in runs)
    return np.array(
        [
            np.log1p(total),
            np.log1p(n),
            links.sum() / total,
            float((chars >= _PROSE_CHARS).mean()),
            *(float((v * chars).sum() / total) for v in opinions),
            float((common * chars).sum() / total),
            float((code * chars).sum() / total),
            prices / n,
            float((far_hint(contexts, "comment") + far_hint(contexts, "forum")).mean()),
            float(far_hint(contexts, "product").mean()),
            float(contexts[:, 2 + SEMANTIC["article"]].mean()),
            *type_flags,
        ],
        dtype=np.float64,
    )


def _signatures(layout: Layout) -> list[tuple[str, ...]]:
    """Tag and first class of a box and two ancestors: equal for the cells of a grid or a thread."""
    own = [_name(box) for box in layout.boxes]
    parents = layout.parent.tolist()
    out: list[tuple[str, ...]] = []
    for b, name in enumerate(own):
        above = parents[b]
        further = parents[above] if above >= 0 else -1
        out.append((name, *(own[a] for a in (above, further) if a >= 0)))
    return out


def _name(box: Box) -> str:
    return f"{box.tag}.{(box.element.get('class') or '').partition(' ')[0]}"


def _is_heading(run: Run) -> bool:
    tag = run.tag
    return len(tag) == 2 and tag[0] == "h" and tag[1].isdigit()
