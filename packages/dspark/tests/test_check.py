"""The checker tells right from wrong: functions, rules and servers with known mistakes."""

from __future__ import annotations

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from deepinfer_dspark import (
    BudgetScheduler,
    DsparkError,
    Proposal,
    SamplingBatch,
    ShapeError,
    StepTable,
    Verifier,
    survival,
)
from deepinfer_dspark.check import check_budget, check_completions, check_verify
from deepinfer_dspark.check.outcomes import outcomes
from deepinfer_dspark.check.verifying import chi_square_quantile
from deepinfer_dspark.cli import main
from deepinfer_dspark.reference import invert, residual

SMALL = {"vocab": 2, "gamma": 2, "cases": 3}


def right(p, q, drafts, uniform):
    out = []
    for k, x in enumerate(drafts):
        if uniform() < min(1.0, p[k][x] / q[k][x]):
            out.append(x)
        else:
            return [*out, invert(residual(p[k], q[k]), uniform())]
    return [*out, invert(p[len(drafts)], uniform())]


def target_for_residual(p, q, drafts, uniform):
    for k, x in enumerate(drafts):
        if uniform() >= min(1.0, p[k][x] / q[k][x]):
            return [*drafts[:k], invert(p[k], uniform())]
    return [*drafts, invert(p[len(drafts)], uniform())]


def softened_residual(p, q, drafts, uniform):
    soft = [[v * math.exp(-5e-5) for v in row] for row in q]
    return right(p, soft, drafts, uniform)


def one_uniform(p, q, drafts, uniform):
    u = uniform()
    for k, x in enumerate(drafts):
        if u >= min(1.0, p[k][x] / q[k][x]):
            return [*drafts[:k], invert(residual(p[k], q[k]), uniform())]
    return [*drafts, invert(p[len(drafts)], uniform())]


def shifted_row(p, q, drafts, uniform):
    return right([p[0], *p[:-1]], q, drafts, uniform)


class Streamed:
    """Our verifier, fed from the uniforms of the check in the order it asks."""

    def __init__(self, uniform):
        self.uniform = uniform

    def __call__(self, purpose, seeds, positions):
        shape = np.broadcast_shapes(np.shape(seeds), np.shape(positions))
        return np.array([self.uniform() for _ in range(math.prod(shape))]).reshape(shape)


def ours(p, q, drafts, uniform):
    n = len(drafts)
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(p))
    proposal = Proposal(np.array([drafts]), np.array([n]), q=np.array([q]))
    return (
        Verifier()
        .verify(logits, [0, n + 1], proposal, [n], SamplingBatch.uniform(1), rng=Streamed(uniform))
        .emitted(0)
    )


WRONG = [target_for_residual, softened_residual, one_uniform, shifted_row]


def test_right_functions_pass_by_enumeration() -> None:
    assert check_verify(right, **SMALL).kept
    assert check_verify(ours, vocab=2, gamma=1, cases=2).kept


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_wrong_functions_are_found_by_enumeration(wrong) -> None:
    report = check_verify(wrong, **SMALL)
    assert not report.kept
    assert report.worst > 1e-6
    assert "off by" in report.findings[0]


def test_counting_finds_what_is_large_enough() -> None:
    sizes = {"vocab": 3, "gamma": 1, "cases": 2, "draws": 20_000}
    assert check_verify(right, **sizes).kept
    assert not check_verify(target_for_residual, **sizes).kept


def test_outcomes_of_a_function_of_uniforms_are_its_distribution() -> None:
    def play(uniform):
        if uniform() < 0.25:
            return (0,)
        return (1, 0) if uniform() < 1 / 3 else (1, 1)

    law: dict[tuple[int, ...], float] = {}
    for text, mass in outcomes(play):
        law[text] = law.get(text, 0.0) + mass
    assert law == pytest.approx({(0,): 0.25, (1, 0): 0.25, (1, 1): 0.5}, abs=1e-8)


SCHEDULER = BudgetScheduler(StepTable((1, 2, 3, 4, 5, 6), (1.0, 2.0, 2.2, 2.4, 4.4, 4.5)), 2)


def causal(older, conf):
    return SCHEDULER.allocate(SCHEDULER.budget(older), conf)


def retrospective(older, conf):
    return SCHEDULER.allocate(SCHEDULER.budget(conf), conf)


def winners(older, conf):
    """The most confident drafts whatever stands before them, counted by request."""
    best = np.argsort(-conf, axis=None, kind="stable")[:2]
    return np.bincount(best // conf.shape[1], minlength=conf.shape[0])


def threshold(older, conf):
    return np.logical_and.accumulate(conf >= 0.5, axis=1).sum(axis=1)


def looks_ahead(older, conf):
    return np.where(survival(conf)[:, -1] > 0.3, conf.shape[1], 0)


def test_rules_that_look_only_at_what_they_may_pass() -> None:
    for rule in (causal, threshold, lambda older, conf: np.arange(1, len(conf) + 1)):
        assert check_budget(rule, cases=5).kept


@pytest.mark.parametrize("rule", [retrospective, winners, looks_ahead], ids=lambda f: f.__name__)
def test_rules_that_anticipate_are_found_and_shown(rule) -> None:
    report = check_budget(rule, cases=5)
    assert not report.kept
    assert report.worst > 1e-3
    assert "depends on that draft" in report.findings[-1]


def server(honest: bool) -> ThreadingHTTPServer:
    law = {"a": 0.5, "b": 0.3, "c": 0.2}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            rng = np.random.default_rng(body["seed"])
            drawn = [0.5, 0.3, 0.2] if honest else [0.62, 0.25, 0.13]
            tokens = [str(t) for t in rng.choice(list(law), p=drawn, size=body["max_tokens"])]
            tops = [{t: math.log(v) for t, v in law.items()} for _ in tokens]
            answer = {"choices": [{"logprobs": {"tokens": tokens, "top_logprobs": tops}}]}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format, *args) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.mark.parametrize("honest", [True, False])
def test_a_server_is_held_to_the_logprobs_it_reports(honest: bool, capsys) -> None:
    with server(honest) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{running.server_address[1]}/v1/completions"
        code = main(["check", "http", url, "--model", "m", "--requests", "500", "--tokens", "2"])
        running.shutdown()
        thread.join()
    assert code == (0 if honest else 1)
    assert ("NOT KEPT" in capsys.readouterr().out) != honest


def test_servers_without_logprobs_are_named() -> None:
    for answer in ({}, {"choices": []}, {"choices": [{"logprobs": None}]},
                   {"choices": [{"logprobs": {"tokens": ["a"], "top_logprobs": []}}]}):  # fmt: skip
        with pytest.raises(DsparkError, match="log-prob"):
            check_completions(lambda body, a=answer: a, model="m", prompt="x", requests=200)


def test_the_command_checks_functions_of_this_folder(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "my_engine.py").write_text(
        "def sure(p, q, drafts, uniform):\n    return [*drafts, 0]\n"
        "def none(older, conf):\n    return [0] * len(conf)\n"
        "number = 3\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    options = ["--vocab", "2", "--gamma", "1", "--cases", "2"]
    assert main(["check", "verify", "my_engine:sure", *options]) == 1
    assert main(["check", "budget", "my_engine:none", *options]) == 0
    for bad in ("my_engine", "my_engine:missing", "no_such_module:f", "my_engine:number",
                "json:dumps"):  # fmt: skip
        assert main(["check", "verify", bad]) == 2
    assert main(["check", "budget", "json:dumps"]) == 2
    assert "NOT KEPT" in capsys.readouterr().out


def test_functions_that_answer_nonsense_are_named() -> None:
    for answer in ([], [7], [0, 0, 0, 0]):
        with pytest.raises(DsparkError, match="emitted"):
            check_verify(lambda p, q, drafts, u, a=answer: a, **SMALL)
    for answer in (np.array([0.5, 1.0]), np.array([1]), np.array([9, 0])):
        with pytest.raises(DsparkError, match="want int"):
            check_budget(lambda older, conf, a=answer: a)
    with pytest.raises(DsparkError, match="uniforms"):
        check_verify(lambda p, q, drafts, u: [int(sum(u() for _ in range(99)))], **SMALL)
    for options in ({"vocab": 1}, {"gamma": 0}, {"draws": 3}):
        with pytest.raises(ShapeError):
            check_verify(right, **options)


def test_quantiles_are_not_below_the_exact_ones() -> None:
    exact = {(1, 1e-4): 15.137, (2, 1e-4): 18.421, (5, 1e-4): 25.745, (20, 1e-4): 52.386,
             (1, 1e-6): 23.928, (2, 1e-6): 27.631, (5, 1e-6): 35.888}  # fmt: skip
    for (degrees, level), value in exact.items():
        assert value <= chi_square_quantile(degrees, level) < 1.25 * value
