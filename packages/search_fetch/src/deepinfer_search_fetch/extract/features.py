"""Numbers that describe a run for the keep/drop model: text, links, place, container, neighbours.

No feature knows the page's URL, host or vocabulary beyond a few kinds of words every site shares.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from deepinfer_search_fetch.extract.hints import SEMANTIC, context_columns, far_hint
from deepinfer_search_fetch.extract.layout import Floats, Ints, Layout, lay_out
from deepinfer_search_fetch.extract.tree import Box, PageTree, Run
from deepinfer_search_fetch.extract.voters import CHAIN, shifted, voter_columns, window

_SENTENCE_END = re.compile(r"[.!?。！？…][\"'”’)\]]?(?:\s|$)|[。！？]")  # noqa: RUF001
_BOILER = re.compile(
    r"cookie|©|\(c\) ?\d{4}|all rights reserved|privacy|terms of|sign (?:in|up)|log ?in|subscribe"
    r"|newsletter|follow us|share (?:this|on)|read more|load more|show more|learn more|click here"
    r"|powered by|javascript|add to cart|skip to|back to top|datenschutz|impressum|alle rechte"
    r"|mentions légales|tous droits|abonn|anmelden|zaloguj|polityka|copyright",
    re.I,
)
# What stands above the parts that follow an article: a short run of this kind ends the content.
_TAIL = re.compile(
    r"related|you (?:may|might) (?:also )?like|read (?:more|next|also)"
    r"|more (?:from|on|in|stories|news)|\bcomments?\b|leave a (?:reply|comment)"
    r"|about the author|^share|^tags?\b|^filed under|newsletter"
    r"|subscribe|recommended|popular|latest|trending|see also|sponsored|advertis|recent posts"
    r"|auch interessant|mehr (?:zum thema|aus)|kommentar|ähnliche|^teilen|schlagw|weitere"
    r"|meistgelesen|beliebt|à lire aussi|commentaire|similaires"
    r"|partager|sur le même|komentarz|czytaj|zobacz"
    r"|podobne|polecane|udostępnij|powiązane|comentario|compart|relacionad|te puede interesar"
    r"|leggi anche|condivid|leia (?:mais|também)|reacties|lees ook|deel dit",
    re.I,
)
_CREDIT = re.compile(
    r"\b(?:photo|image|picture|foto|bild|crédit|credit|quelle|source)\b[^.]{0,30}"
    r"(?::|©| by |/|getty)|getty images|shutterstock|reuters\)|\(ap\b|©",
    re.I,
)
FURNITURE = re.compile("|".join(p.pattern for p in (_BOILER, _TAIL, _CREDIT)), re.I)
_DATE = re.compile(r"\b(?:19|20)\d\d\b|\b\d{1,2}[./:-]\d{1,2}\b|\bago\b", re.I)
_PRICE = re.compile(r"[$€£¥]\s?\d|\d\s?(?:€|zł|kr|USD|EUR)\b")
_DIGIT = re.compile(r"\d")
_UPPER = re.compile(r"[A-ZÀ-ÖØ-ÞĄĆĘŁŃÓŚŹŻА-Я]")
_CAPITALISED = re.compile(r"(?<![^\W])[A-ZÀ-ÖØ-ÞĄĆĘŁŃÓŚŹŻА-Я]")
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
    sentences = np.array([len(_SENTENCE_END.findall(r.text)) for r in runs], dtype=np.float64)
    opinions = [np.array(v, dtype=np.float64) for v in votes]
    contexts = context_columns(layout)
    local = _local_columns(runs, run_words, sentences, layout, title)
    headings = np.array([_is_heading(r) for r in runs], dtype=np.float64)
    prose = (chars >= _PROSE_CHARS).astype(np.float64)
    link_share = links / chars

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
        *_heading_columns(runs, headings, chars, prose, link_share, title),
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
    layout: Layout,
    title: str,
) -> Floats:
    """What a run says by itself, and how often the page repeats it or its kind."""
    signatures = _signatures(layout)
    repeats = Counter(signatures[b] for b in layout.box_of.tolist())
    seen: Counter[str] = Counter(r.text for r in runs)
    title_words = set(title.lower().split())
    rows: list[list[float]] = []
    for run, words_here, stops, b in zip(
        runs, run_words, sentences.tolist(), layout.box_of.tolist(), strict=True
    ):
        text = run.text
        head = text[:400]
        size = max(len(text), 1)
        sample = max(len(head), 1)
        count = max(len(words_here), 1)
        shared = len(title_words.intersection(words_here))
        rows.append(
            [
                len(words_here),
                size,
                run.link_chars / size,
                stops / count * 10,
                min(stops, 10.0),
                bool(_SENTENCE_END.search(text[-3:])),
                text.count(",") / size * 100,
                len(_DIGIT.findall(head)) / sample,
                len(_UPPER.findall(head)) / sample,
                len(_CAPITALISED.findall(head)) / min(count, sample),
                bool(_BOILER.search(head)),
                bool(_DATE.search(text[:200])),
                bool(_PRICE.search(text[:200])),
                bool(_CREDIT.search(head)),
                len(words_here) <= 7 and bool(_TAIL.search(text)),
                seen[text],
                repeats[signatures[b]],
                shared / count,
                shared / max(len(title_words), 1),
                text.endswith(":"),
                text.endswith(("…", "...")),
                text[:1].islower(),
                any(not isinstance(i, str) and i.tag in _EMPHASIS for i in run.items),
                sum(not isinstance(i, str) and i.tag == "a" for i in run.items),
            ]
        )
    out = np.array(rows, dtype=np.float64)
    for column in (0, 1, 16, 23):  # words, characters, repeats, links: counts of any size
        out[:, column] = np.log1p(out[:, column])
    kinds = np.array([[r.tag in group for group in _TAG_GROUPS] for r in runs], dtype=np.float64)
    return np.concatenate([out, kinds], axis=1)


def _heading_columns(
    runs: Sequence[Run],
    headings: Floats,
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
        [len(r.text) <= 60 and bool(_TAIL.search(r.text)) for r in runs], dtype=np.float64
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
    prices = sum(bool(_PRICE.search(r.text)) for r in runs)
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
