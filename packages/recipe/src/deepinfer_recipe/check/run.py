"""Running a check and printing what came of it."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from deepinfer_recipe.check import chat_rules, messages_rules, responses_rules
from deepinfer_recipe.check.answers import Reply
from deepinfer_recipe.check.cases import Case
from deepinfer_recipe.check.recorded import check_answer, check_conversion
from deepinfer_recipe.check.rules import Problems, check_error, parsed
from deepinfer_recipe.check.sse import read_events
from deepinfer_recipe.serving.wire_errors import ProtocolName

_RULES: dict[ProtocolName, ModuleType] = {
    "chat": chat_rules,
    "responses": responses_rules,
    "messages": messages_rules,
}
_LIMITS = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
_SHOWN_PROBLEMS = 4


class Answers(Protocol):
    """Where answers come from."""

    @property
    def name(self) -> str:
        """What is checked."""
        ...

    def ask(self, protocol: ProtocolName, body: Any) -> Reply:
        """The answer to one request."""
        ...


@dataclass(frozen=True, slots=True)
class Result:
    """One case and what is wrong with its answer."""

    case: Case
    problems: list[str]


def check_reply(case: Case, reply: Reply) -> Problems:
    """Status, media type and body, by the rules of the protocol."""
    problems = Problems()
    request = case.request if isinstance(case.request, dict) else {}
    expect = case.fields.get("expect", {})
    try:
        reply.body.encode()
    except UnicodeEncodeError:
        problems.append("the body is not UTF-8")
        return problems
    is_error = reply.status >= 400
    if case.wants_error is not None and is_error != case.wants_error:
        wanted = "a refusal" if case.wants_error else "an answer"
        problems.append(f"status {reply.status}: expected {wanted}: {reply.body[:120]!r}")
        return problems
    if is_error:
        problems.need(
            reply.media_type == "application/json", f"an error of type {reply.media_type!r}"
        )
        body = parsed(problems, reply.body, "the error")
        param = expect.get("param") if case.kind == "wire" else None
        return problems.also(check_error(case.protocol, reply.status, body, param))
    rules = _RULES[case.protocol]
    if request.get("stream"):
        problems.need(
            reply.media_type == "text/event-stream", f"a stream of type {reply.media_type!r}"
        )
        events, faults = read_events(reply.body)
        return problems.also(faults).also(rules.check_stream(events, request))
    problems.need(reply.media_type == "application/json", f"an answer of type {reply.media_type!r}")
    body = parsed(problems, reply.body, "the answer")
    return problems.also(rules.check_response(body))


def _short(case: Case) -> Any:
    """The request of a recorded case with a small limit, so that a real model answers soon."""
    request, name = case.request, _LIMITS[case.protocol]
    if case.kind == "wire" or not isinstance(request, dict) or request.get(name) is not None:
        return request
    return {**request, name: 32}


def run_cases(cases: Sequence[Case], answers: Answers, *, is_own: bool) -> list[Result]:
    """Check all cases; recorded ones against this library by their record."""
    results: list[Result] = []
    for case in cases:
        if is_own and case.kind == "convert":
            problems: list[str] = check_conversion(case)
        elif is_own and case.kind == "stream":
            problems = check_answer(case)
        else:
            try:
                problems = check_reply(case, answers.ask(case.protocol, _short(case)))
            except (OSError, http.client.HTTPException) as error:
                problems = [f"no answer: {type(error).__name__}: {error}"]
        results.append(Result(case, problems))
    return results


def report(results: Sequence[Result], name: str) -> str:
    """A table of what passed, then each failure."""
    lines = [f"{name}: {len(results)} cases", f"{'protocol':<10} {'passed':>7} {'failed':>7}"]
    for protocol in _RULES:
        own = [r for r in results if r.case.protocol == protocol]
        failed = sum(bool(r.problems) for r in own)
        if own:
            lines.append(f"{protocol:<10} {len(own) - failed:>7} {failed:>7}")
    for result in results:
        if result.problems:
            lines.append(f"FAILED {result.case.id} ({result.case.protocol})")
            lines += [f"  {problem}" for problem in result.problems[:_SHOWN_PROBLEMS]]
            more = len(result.problems) - _SHOWN_PROBLEMS
            lines += [f"  and {more} more"] if more > 0 else []
    return "\n".join(lines)
