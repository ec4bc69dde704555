"""Whether a server's sampled text follows the log-probabilities it reports itself."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from deepinfer_dspark.check.report import Report
from deepinfer_dspark.check.verifying import chi_square_ratio
from deepinfer_dspark.errors import DsparkError, ShapeError

MAX_BYTES = 1 << 22
Post = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Sends one completion request, as a JSON object, and returns the answer."""


def check_completions(
    post: Post, *, model: str, prompt: str, requests: int = 2000, tokens: int = 3, top: int = 5
) -> Report:
    """Draw `requests` completions at temperature 1, each with its own seed, and compare what came
    with the reported log-probabilities, prefix by prefix.

    post: sends one body to an OpenAI-style completions endpoint; `http_post(url)` makes one. The
    server must report the target's log-probabilities, and without truncation (top_p 1).
    Tests at a level of 1e-4 over all prefixes together.
    """
    if requests < 200 or tokens < 1 or not 1 <= top <= 20:
        raise ShapeError(
            f"check_completions wants requests >= 200, tokens >= 1 and top in 1..20, got "
            f"{requests}, {tokens} and {top}"
        )
    seen: dict[tuple[str, ...], dict[str, int]] = {}
    laws: dict[tuple[str, ...], dict[str, float]] = {}
    for seed in range(requests):
        answer = post(
            {
                "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 1.0,
                "top_p": 1.0, "logprobs": top, "seed": seed,
            }
        )  # fmt: skip
        text, tops = _read(answer)
        for k, token in enumerate(text):
            prefix = tuple(text[:k])
            laws.setdefault(prefix, tops[k])
            counts = seen.setdefault(prefix, {})
            counts[token] = counts.get(token, 0) + 1
    tested = {p: c for p, c in seen.items() if sum(c.values()) >= 50}
    findings: list[tuple[float, str]] = []
    worst = 0.0
    for prefix, counts in tested.items():
        ratio = _ratio(counts, laws[prefix], 1e-4 / len(tested))
        worst = max(worst, ratio)
        if ratio > 1.0:
            where = "".join(prefix)
            findings.append((ratio, f"after {where!r}: chi-square {ratio:.2f} of its limit"))
    findings.sort(reverse=True)
    return Report(
        not findings,
        f"{requests} completions counted, {len(tested)} prefixes seen 50 times or more",
        worst,
        tuple(text for _, text in findings[:8]),
    )


def _ratio(counts: Mapping[str, int], law: Mapping[str, float], level: float) -> float:
    listed = [math.exp(v) for v in law.values()]
    rest = max(1.0 - sum(listed), 0.0)
    if rest < 1e-9:
        rest = 0.0
    other = sum(n for token, n in counts.items() if token not in law)
    found = np.array([*(counts.get(token, 0) for token in law), other], dtype=np.float64)
    return chi_square_ratio(found, np.array([*listed, rest]), level)


def _read(answer: Mapping[str, Any]) -> tuple[list[str], list[dict[str, float]]]:
    """Tokens of the first choice, and the reported most likely tokens at each of them."""
    try:
        found = answer["choices"][0]["logprobs"]
        text = [str(t) for t in found["tokens"]]
        tops = [{str(t): float(v) for t, v in row.items()} for row in found["top_logprobs"]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
        raise DsparkError(
            f"the answer has no choices[0].logprobs.tokens and .top_logprobs ({e!r}): the server "
            "must report log-probabilities"
        ) from e
    if not text or len(text) != len(tops):
        raise DsparkError(f"the answer has {len(text)} tokens and {len(tops)} log-probabilities")
    return text, tops


def http_post(url: str, key: str | None = None, timeout_s: float = 60.0) -> Post:
    """A `Post` to an http or https address, with a bearer key if there is one."""
    if not url.startswith(("http://", "https://")):
        raise ShapeError(f"want an http or https address, got {url!r}")
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"

    def post(body: Mapping[str, Any]) -> Mapping[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # nosec B310
                found: object = json.loads(answer.read(MAX_BYTES))
        except (urllib.error.URLError, OSError, ValueError) as e:
            raise DsparkError(f"{url} did not answer with JSON: {e}") from e
        if not isinstance(found, dict):
            raise DsparkError(f"{url} answered {type(found).__name__}, want a JSON object")
        return cast("dict[str, Any]", found)

    return post
