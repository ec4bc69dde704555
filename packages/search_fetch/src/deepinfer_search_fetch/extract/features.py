"""Numbers that describe a run for the keep/drop model: text, links, place, container, neighbours.

No feature knows the page's URL, host or vocabulary beyond a few kinds of words every site shares.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from deepinfer_search_fetch.extract.tree import Box, PageTree, Run

_HINTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.I))
    for name, pattern in (
        ("content", r"content|article|entry|story|main|body|text|prose|markdown|post(?!er|age)"),
        ("nav", r"nav|menu|breadcrumb|toc\b|pagination|pager|skip|tabs?\b"),
        ("frame", r"footer|header|masthead|topbar|copyright|colophon|sitenotice"),
        ("side", r"side|aside|widget|rail|related|recommend|popular|trending|more-|also|latest"),
        (
            "promo",
            r"promo|banner|\bad[sv]?\b|ad-|-ad\b|sponsor|cta|newsletter|subscri|signup|offer",
        ),
        ("consent", r"cookie|consent|gdpr|modal|popup|overlay|dialog|toast|login|signin"),
        ("social", r"share|social|follow|facebook|twitter|like|vote|rating"),
        ("meta", r"meta|byline|author|date|time|tag|categor|label|info|credit|caption"),
        ("comment", r"comment|reply|replies|disqus|respond|discuss"),
        ("forum", r"thread|topic|message|posts?\b|answer|question|quote|signature"),
        ("product", r"product|price|spec|sku|cart|buy|variant|review|description|feature"),
        ("listing", r"card|grid|item|list|result|tile|teaser|archive|feed|gallery|carousel|slide"),
        ("section", r"section|hero|container|wrapper|block|row|col|panel|faq|accordion"),
        ("code", r"code|highlight|syntax|source|example|snippet|api|docs?\b|method"),
    )
)
_SEMANTIC = (
    "article",
    "main",
    "nav",
    "header",
    "footer",
    "aside",
    "form",
    "section",
    "table",
    "figure",
    "blockquote",
    "dl",
)
_LIST = frozenset({"ul", "ol", "dl", "menu"})
_SENTENCE_END = re.compile(r"[.!?。！？…][\"'”’)\]]?(?:\s|$)|[。！？]")  # noqa: RUF001
_BOILER = re.compile(
    r"cookie|©|\(c\) ?\d{4}|all rights reserved|privacy|terms of|sign (?:in|up)|log ?in|subscribe"
    r"|newsletter|follow us|share (?:this|on)|read more|load more|show more|learn more|click here"
    r"|powered by|javascript|add to cart|skip to|back to top|datenschutz|impressum|alle rechte"
    r"|mentions légales|tous droits|abonn|anmelden|zaloguj|polityka|copyright",
    re.I,
)
_DATE = re.compile(r"\b(?:19|20)\d\d\b|\b\d{1,2}[./:-]\d{1,2}\b|\bago\b", re.I)
_PRICE = re.compile(r"[$€£¥]\s?\d|\d\s?(?:€|zł|kr|USD|EUR)\b")


class _Stats:
    """Totals of one box over everything below it."""

    __slots__ = ("chars", "links", "long", "runs", "sentences", "vote_a", "vote_b")

    def __init__(self) -> None:
        self.runs = self.chars = self.links = self.long = self.sentences = 0
        self.vote_a = self.vote_b = 0.0

    def add(self, chars: int, links: int, sentences: int, vote_a: float, vote_b: float) -> None:
        self.runs += 1
        self.chars += chars
        self.links += links
        self.long += chars >= 80
        self.sentences += sentences
        self.vote_a += vote_a * chars
        self.vote_b += vote_b * chars

    def row(self, page_chars: int) -> list[float]:
        chars = max(self.chars, 1)
        return [
            math.log1p(self.runs),
            self.chars / page_chars,
            self.links / chars,
            self.long / max(self.runs, 1),
            self.sentences / max(self.runs, 1),
            self.vote_a / chars,
            self.vote_b / chars,
        ]


class _Context:
    """What a box inherits: semantic ancestors and class hints, near and far."""

    __slots__ = ("far", "in_link", "in_list", "near", "semantic")

    def __init__(self, box: Box, parent: _Context | None) -> None:
        tag = box.tag
        attributes = box.element.attrib
        hints = " ".join(
            v for v in (attributes.get("class"), attributes.get("id"), attributes.get("role")) if v
        )[:300]
        own = [bool(p.search(hints)) for _, p in _HINTS] if hints else [False] * len(_HINTS)
        if parent is None:
            # The body's classes describe the page, not a place in it.
            self.near = self.far = [0.0] * len(_HINTS)
            self.semantic = [0.0] * len(_SEMANTIC)
            self.in_list = self.in_link = 0.0
            return
        self.near = [1.0 if o else 0.6 * n for o, n in zip(own, parent.near, strict=True)]
        self.far = [max(float(o), f) for o, f in zip(own, parent.far, strict=True)]
        self.semantic = [
            1.0 if tag == name else value
            for name, value in zip(_SEMANTIC, parent.semantic, strict=True)
        ]
        self.in_list = 1.0 if tag in _LIST else parent.in_list
        self.in_link = 1.0 if tag == "a" else parent.in_link


def run_features(
    page: PageTree,
    run_words: Sequence[list[str]],
    vote_a: Sequence[float],
    vote_b: Sequence[float],
    title: str,
    type_flags: Sequence[float],
) -> tuple[list[list[float]], list[float]]:
    """One row per run (text, place, ancestors, neighbours, page) and the page's own row.

    run_words: words of every run. vote_a, vote_b: 0..1 per run (see `candidates.votes`).
    type_flags: `Metadata.type_flags` of the page.
    """
    runs = page.runs
    if not runs:
        return [], []
    page_chars = max(sum(len(r.text) for r in runs), 1)
    sentences = [len(_SENTENCE_END.findall(r.text)) for r in runs]
    stats = _collect_stats(runs, sentences, vote_a, vote_b)
    contexts = _collect_contexts(runs)
    signatures = [_signature(r.box) for r in runs]
    repeats = Counter(signatures)
    seen_texts: Counter[str] = Counter(r.text for r in runs)
    title_words = set(title.lower().split())
    page_row = _page_row(runs, contexts, vote_a, vote_b, type_flags)
    local = [
        _local_row(r, w, s, seen_texts, repeats[g], title_words)
        for r, w, s, g in zip(runs, run_words, sentences, signatures, strict=True)
    ]
    h1_at = next((i for i, r in enumerate(runs) if r.tag == "h1"), -1)
    rows: list[list[float]] = []
    position = 0
    since_heading = 99
    for i, run in enumerate(runs):
        since_heading = 0 if _is_heading(run) else since_heading + 1
        context = contexts[run.box]
        box = run.box
        chain = [box, box.parent or box]
        chain.append(chain[-1].parent or chain[-1])
        chain.append(chain[-1].parent or chain[-1])
        row = [
            *local[i],
            vote_a[i],
            vote_b[i],
            position / page_chars,
            i / len(runs),
            float(box.depth),
            min(since_heading, 30),
            max(-50.0, min(200.0, i - h1_at)) if h1_at >= 0 else -51.0,
            context.in_list,
            context.in_link,
            *context.semantic,
            *context.near,
            *context.far,
        ]
        for ancestor in chain:
            row += stats[ancestor].row(page_chars)
        for offset in (-3, -2, -1, 1, 2, 3):
            j = i + offset
            if 0 <= j < len(runs):
                row += [local[j][0], local[j][2], vote_a[j], vote_b[j], float(_is_heading(runs[j]))]
            else:
                row += [-1.0, 0.0, -1.0, -1.0, 0.0]
        row += _window(vote_a, i, 8), _window(vote_b, i, 8)
        row += page_row
        rows.append(row)
        position += len(run.text)
    return rows, page_row


def _page_row(
    runs: Sequence[Run],
    contexts: dict[Box, _Context],
    vote_a: Sequence[float],
    vote_b: Sequence[float],
    type_flags: Sequence[float],
) -> list[float]:
    sizes = [len(r.text) for r in runs]
    chars = max(sum(sizes), 1)
    count = len(runs)

    def share(values: Iterable[float]) -> float:
        return sum(v * n for v, n in zip(values, sizes, strict=True)) / chars

    return [
        math.log1p(chars),
        math.log1p(count),
        sum(r.link_chars for r in runs) / chars,
        sum(n >= 80 for n in sizes) / count,
        share(vote_a),
        share(vote_b),
        share(min(a, b) for a, b in zip(vote_a, vote_b, strict=True)),
        share(float(r.tag == "pre") for r in runs),
        sum(bool(_PRICE.search(r.text)) for r in runs) / count,
        sum(contexts[r.box].far[8] + contexts[r.box].far[9] for r in runs) / count,
        sum(contexts[r.box].far[10] for r in runs) / count,
        sum(contexts[r.box].semantic[0] for r in runs) / count,
        *type_flags,
    ]


def _local_row(
    run: Run,
    words_here: list[str],
    sentences: int,
    seen: Counter[str],
    repeats: int,
    title_words: set[str],
) -> list[float]:
    text = run.text
    chars = max(len(text), 1)
    tag = run.tag
    return [
        math.log1p(len(words_here)),
        math.log1p(chars),
        run.link_chars / chars,
        sentences / max(len(words_here), 1) * 10,
        float(min(sentences, 10)),
        float(bool(_SENTENCE_END.search(text[-3:]))),
        text.count(",") / chars * 100,
        sum(c.isdigit() for c in text[:400]) / min(chars, 400),
        sum(c.isupper() for c in text[:400]) / min(chars, 400),
        float(bool(_BOILER.search(text[:400]))),
        float(bool(_DATE.search(text[:200]))),
        float(bool(_PRICE.search(text[:200]))),
        float(seen[text] > 1),
        math.log1p(repeats),
        len(title_words.intersection(words_here)) / max(len(words_here), 1),
        float(text.endswith(":")),
        float(text[:1].islower()),
        float(tag == "p"),
        float(tag in ("h1", "h2")),
        float(tag in ("h3", "h4", "h5", "h6")),
        float(tag == "li"),
        float(tag in ("td", "th")),
        float(tag == "pre"),
        float(tag in ("div", "section", "article", "body")),
        float(tag in ("button", "label", "option", "select", "summary", "legend")),
        float(tag in ("figcaption", "caption")),
        float(tag in ("blockquote", "dd", "dt")),
        float(any(not isinstance(i, str) and i.tag in ("b", "strong", "em") for i in run.items)),
    ]


def _collect_stats(
    runs: Sequence[Run],
    sentences: Sequence[int],
    vote_a: Sequence[float],
    vote_b: Sequence[float],
) -> dict[Box, _Stats]:
    stats: dict[Box, _Stats] = {}
    for run, n, a, b in zip(runs, sentences, vote_a, vote_b, strict=True):
        box: Box | None = run.box
        while box is not None:
            stats.setdefault(box, _Stats()).add(len(run.text), run.link_chars, n, a, b)
            box = box.parent
    return stats


def _collect_contexts(runs: Sequence[Run]) -> dict[Box, _Context]:
    contexts: dict[Box, _Context] = {}
    for run in runs:
        path: list[Box] = []
        box: Box | None = run.box
        while box is not None and box not in contexts:
            path.append(box)
            box = box.parent
        for missing in reversed(path):
            parent = contexts[missing.parent] if missing.parent is not None else None
            contexts[missing] = _Context(missing, parent)
    return contexts


def _signature(box: Box) -> tuple[str, ...]:
    """Tag and first class of a box and two ancestors: equal for the cells of a grid or a thread."""
    out: list[str] = []
    current: Box | None = box
    for _ in range(3):
        if current is None:
            break
        out.append(current.tag + "." + (current.element.get("class") or "").partition(" ")[0])
        current = current.parent
    return tuple(out)


def _is_heading(run: Run) -> bool:
    tag = run.tag
    return len(tag) == 2 and tag[0] == "h" and tag[1].isdigit()


def _window(values: Sequence[float], i: int, radius: int) -> float:
    part = values[max(0, i - radius) : i + radius + 1]
    return sum(part) / len(part)
