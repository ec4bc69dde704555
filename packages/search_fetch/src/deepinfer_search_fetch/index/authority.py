"""Source authority by an open formula: A = (n·L + 4·P) / (n + 4).

P is the prior of the host (`priors.json`), L its place in a link graph and n the evidence,
min(12, log2(1 + referring domains)). Without a link graph n is 0 and A is the prior.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.models import Authority

PRIOR_WEIGHT = 4.0
MAX_EVIDENCE = 12.0
USER_AREA_CAP = 0.6
_USER_AREA = re.compile(r"/(?:@|~|users?/|u/|profile/)|#comment", re.I)


@dataclass(frozen=True, slots=True)
class LinkEvidence:
    """A host in a link graph: ranks from 0 (best) of `hosts`, and how many domains refer to it."""

    harmonic_position: int
    pagerank_position: int
    hosts: int
    referring_domains: int

    @property
    def link_score(self) -> float:
        """L = 0.6·r_H + 0.4·r_PR with r = 1 - ln(1 + position) / ln(1 + hosts)."""
        scale = math.log(1 + max(self.hosts, 1))
        harmonic = 1 - math.log(1 + self.harmonic_position) / scale
        pagerank = 1 - math.log(1 + self.pagerank_position) / scale
        return max(0.0, min(1.0, 0.6 * harmonic + 0.4 * pagerank))


def authority(url: str, evidence: LinkEvidence | None = None) -> Authority:
    """Authority of one page's source."""
    return explain(url, evidence)[0]


def explain(url: str, evidence: LinkEvidence | None = None) -> tuple[Authority, dict[str, Any]]:
    """The authority of `url` (or of a bare host name) and every input of the formula."""
    parsed = urls.parse(url if "://" in url else f"https://{url}/") if url else None
    host = parsed.host if parsed else ""
    prior, kind = _prior(host)
    n = 0.0
    link = 0.0
    if evidence is not None:
        n = min(MAX_EVIDENCE, math.log2(1 + evidence.referring_domains))
        link = evidence.link_score
    score = (n * link + PRIOR_WEIGHT * prior) / (n + PRIOR_WEIGHT)
    https = bool(parsed and parsed.scheme == "https")
    page = score * (0.9 + 0.1 * https)
    user_area = bool(parsed and _USER_AREA.search(parsed.target))
    if user_area:
        page = min(page, USER_AREA_CAP)
    page = round(page, 4)
    basis = [f"prior:{kind}", *(["own_graph"] if evidence is not None else [])]
    inputs = {
        "host": host,
        "prior": prior,
        "prior_kind": kind,
        "evidence": round(n, 4),
        "link_score": round(link, 4),
        "https": https,
        "user_area": user_area,
        "formula": "A = (evidence*link_score + 4*prior)/(evidence + 4) * (0.9 + 0.1*https)",
    }
    return Authority(score=page, tier=tier(page, prior), basis=basis), inputs


def tier(score: float, prior: float) -> int:
    """-1 for a source listed as harmful (prior 0), else 0..4 by fifths."""
    return -1 if prior == 0 else min(4, int(score * 5))


def _prior(host: str) -> tuple[float, str]:
    table = _rules()
    labels = host.split(".")
    for i in range(len(labels)):
        found = table.get(".".join(labels[i:]))
        if found is not None:
            return found
    return table[""]


@lru_cache(maxsize=1)
def _rules() -> dict[str, tuple[float, str]]:
    data = json.loads((files("deepinfer_search_fetch.index") / "priors.json").read_text("utf-8"))
    table = {r["suffix"]: (float(r["prior"]), str(r["kind"])) for r in data["rules"]}
    table[""] = (float(data["unknown"]), "unknown")
    return table
