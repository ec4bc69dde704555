"""What people expect of an offline engine, on a tiny dense model and on the embedded one."""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dense_checkpoint import write_dense

from deepinfer_engine import LLM, ConfigError, Delta, RequestError, SamplingParams
from deepinfer_engine.core import types
from deepinfer_engine.offline import progress as bars

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("offline") / "m", seed=5)


@pytest.fixture(scope="module")
def llm(folder: Path):
    with LLM(folder, dtype="float64", max_num_seqs=4, num_blocks=64) as made:
        yield made


def with_(**changes) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | changes))


def test_any_number_of_prompts(folder: Path) -> None:
    with LLM(folder, max_num_seqs=8, num_blocks=32) as llm:
        done = llm.generate([[3 + i % 50, 7] for i in range(300)], with_(max_tokens=2))
        assert len(done) == 300
        assert done[0] == llm.generate([[3, 7]], with_(max_tokens=2))[0]
        assert llm.generate([], GREEDY) == []
        assert llm._loop.unfinished == 0


def test_every_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    done = llm.generate([[5], [6]], [with_(max_tokens=3), with_(max_tokens=7)])
    assert [len(c.token_ids) for c in done] == [3, 7]
    with pytest.raises(RequestError, match="one for each of 2 prompts, got 1"):
        llm.generate([[5], [6]], [GREEDY])


def test_parameters_of_the_engine_alone_are_taken_too(llm: LLM) -> None:
    old = types.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert llm.generate([[5]], old) == llm.generate([[5]], GREEDY)  # type: ignore[arg-type]


def test_pieces_of_a_stream_make_the_completion(llm: LLM) -> None:
    (whole,) = llm.generate(["w1 w2"], GREEDY)
    pieces = list(llm.stream(["w1 w2"], GREEDY))
    assert all(isinstance(p, Delta) for p in pieces)
    assert len(pieces) > 3
    assert "".join(p.text for p in pieces) == whole.text
    assert [t for p in pieces for t in p.token_ids] == list(whole.token_ids)
    last = pieces[-1].completion
    assert last is not None
    assert (last.text, last.finish_reason) == (whole.text, "length")
    assert [p.completion for p in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_leaving_a_stream_ends_what_runs(llm: LLM) -> None:
    pieces = llm.stream([[5], [6], [7]], with_(max_tokens=500))
    next(pieces)
    assert llm._loop.unfinished == 3
    pieces.close()  # type: ignore[attr-defined]
    while llm._loop.unfinished:  # a block on its way to the prefix cache is held a moment longer
        assert llm._loop.step(time.monotonic()) is None, "nothing is left to compute"
        llm._loop.wait_for_work()


def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(llm: LLM) -> None:
    (free,) = llm.generate([[5, 6]], with_(max_tokens=40))
    at = len(free.text) // 2
    stop = free.text[at : at + 3]
    first = free.text.index(stop)
    (cut,) = llm.generate([[5, 6]], with_(max_tokens=40, stop=["never said", stop]))
    assert (cut.text, cut.finish_reason, cut.stopped_by) == (free.text[:first], "stop", stop)
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert cut.usage.completion_tokens == len(cut.token_ids) < 40
    pieces = list(llm.stream([[5, 6]], with_(max_tokens=40, stop=stop)))
    assert "".join(p.text for p in pieces) == free.text[:first]
    assert llm._loop.unfinished == 0


def test_n_answers_share_their_prompt(llm: LLM) -> None:
    prompt = [3 + i % 90 for i in range(300)]
    warm = SamplingParams(temperature=1.5, seed=7, max_tokens=8, n=3, ignore_eos=True)
    (done,) = llm.generate([prompt], warm)
    answers = [done, *done.others]
    assert len({a.token_ids for a in answers}) == 3
    assert [a.usage.cached_tokens for a in answers] == [0, 299, 299], "all but the last token"
    (again,) = llm.generate([prompt], warm)
    assert [a.token_ids for a in (again, *again.others)] == [a.token_ids for a in answers]
    (alone,) = llm.generate([prompt], SamplingParams(1.5, seed=7, max_tokens=8, ignore_eos=True))
    assert alone.token_ids == done.token_ids


def test_logprobs_of_a_prompt_are_those_of_its_tokens_when_generated(llm: LLM) -> None:
    (made,) = llm.generate([[5, 6, 7]], with_(logprobs=2, max_tokens=6))
    prompt = [5, 6, 7, *made.token_ids]
    for _ in range(2):  # the second time the prompt is cached, and computed whole all the same
        (said,) = llm.generate([prompt * 60], with_(prompt_logprobs=2, max_tokens=1))
        assert len(said.prompt_logprobs) == len(prompt) * 60 - 1
        assert [p.token for p in said.prompt_logprobs[: len(prompt) - 1]] == prompt[1:]
        for ours, theirs in zip(said.prompt_logprobs[2:8], made.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
            assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]
        assert said.usage.cached_tokens == 0


def test_prompt_logprobs_of_a_prompt_of_several_chunks(llm: LLM) -> None:
    prompt = [3 + i * 7 % 300 for i in range(2500)]
    with LLM(llm._directory, dtype="float64", max_num_seqs=2, num_blocks=40) as other:
        config = {"max_position_embeddings": 4096}
        assert config  # the tiny model takes 1,024 tokens: cut the prompt to that
        (one,) = other.generate([prompt], with_(prompt_logprobs=0, truncate_prompt_tokens=1000))
    assert [p.token for p in one.prompt_logprobs] == prompt[-999:]


def test_only_allowed_tokens_are_produced(llm: LLM) -> None:
    allowed = [10, 11, 319]
    warm = SamplingParams(temperature=2, seed=1, max_tokens=30, allowed_token_ids=allowed)
    (done,) = llm.generate([[5]], warm)
    assert set(done.token_ids) <= set(allowed)
    assert len(done.token_ids) == 30  # end-of-text is not among them


def test_bad_words_are_not_produced(llm: LLM) -> None:
    few = {"temperature": 2, "seed": 3, "max_tokens": 60, "allowed_token_ids": [300, 301, 302, 303]}
    names = [llm._tokenizer.id_to_token(i) for i in (300, 301, 302)]
    (free,) = llm.generate([[5]], SamplingParams(**few))
    assert set(free.token_ids) == {300, 301, 302, 303}
    assert names[0] + names[1] in free.text
    bad = [names[2], names[0] + names[1]]
    (held,) = llm.generate([[5]], SamplingParams(**few, bad_words=bad))
    assert set(held.token_ids) == {300, 301, 303}
    assert bad[1] not in held.text


def test_special_tokens_are_kept_in_the_text_when_wanted(llm: LLM) -> None:
    only = with_(allowed_token_ids=[1], max_tokens=2)
    (left_out,) = llm.generate([[5]], only)
    (kept,) = llm.generate([[5]], with_(allowed_token_ids=[1], max_tokens=2,
                                        skip_special_tokens=False))  # fmt: skip
    assert (left_out.text, kept.text) == ("", "<s><s>")


def test_a_long_prompt_can_be_cut(llm: LLM) -> None:
    assert (
        llm.generate([[9, 9, 5, 6]], with_(truncate_prompt_tokens=2))[0].token_ids
        == llm.generate([[5, 6]], GREEDY)[0].token_ids
    )


def test_one_wave_computes_a_common_beginning_once(folder: Path) -> None:
    common = [3 + i * 7 % 300 for i in range(512)]
    prompts = [[*common, 20 + i, 30] for i in range(4)]
    with LLM(folder, dtype="float64", max_num_seqs=4, num_blocks=64) as llm:
        computed = []
        step = llm._loop.step

        def counted(now):
            plan = step(now)
            if plan is not None and plan.chunks:
                computed.extend(c.end - c.start for c in plan.chunks)
            return plan

        llm._loop.step = counted  # type: ignore[method-assign]
        done = llm.generate(prompts, GREEDY)
        assert [c.usage.cached_tokens for c in done] == [0, 512, 512, 512]
        assert sum(computed) == 514 + 3 * 2
    with LLM(folder, dtype="float64", prefix_cache_bytes=0, max_num_seqs=1) as plain:
        alone = plain.generate(prompts, GREEDY)
    assert [c.usage.cached_tokens for c in alone] == [0] * 4
    assert [c.token_ids for c in alone] == [c.token_ids for c in done]


def test_the_same_holds_for_a_model_with_windows() -> None:
    common = [5 + i * 7 % 900 for i in range(384)]
    prompts = [[*common, 20 + i, 30] for i in range(3)]
    with LLM(max_num_seqs=4, num_blocks=32) as llm:
        done = llm.generate(prompts, with_(max_tokens=3))
        assert [c.usage.cached_tokens for c in done] == [0, 384, 384]


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Where a shell starts its jobs in the background, they begin with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_ends_the_requests_of_the_call_at_once(folder: Path) -> None:
    with LLM(folder, max_num_seqs=4, num_blocks=64) as llm:
        step, told = llm._loop.step, []

        def interrupted(now):
            assert not told, "a step after the one that Ctrl-C came in"
            if llm._loop.snapshot()[1]["running"] == 4:  # none is still being looked up
                told.append(now)
                signal.raise_signal(signal.SIGINT)
            return step(now)

        llm._loop.step = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5], [6], [7], [8]], with_(max_tokens=600))
        assert told
        assert llm._loop.unfinished == 0
        llm._loop.audit()
        llm._loop.step = step  # type: ignore[method-assign]
        assert len(llm.generate([[5]], GREEDY)[0].token_ids) == 12
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_several_threads_share_one_engine(llm: LLM) -> None:
    alone = [llm.generate([[i]], GREEDY)[0].token_ids for i in range(5, 9)]
    found: dict[int, tuple[int, ...]] = {}

    def ask(i: int) -> None:
        found[i] = llm.generate([[i]], GREEDY)[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(5, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(5, 9)] == alone


def test_a_progress_bar_on_request(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    llm.generate([[5], [6]], GREEDY, progress=True)
    assert "2/2" in capsys.readouterr().err
    llm.generate([[5], [6]], GREEDY)  # no terminal
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(bars.sys, "stderr", type("T", (io.StringIO,), {"isatty": lambda s: True})())
    llm.generate([[5], [6]], GREEDY)
    assert "2/2" in bars.sys.stderr.getvalue()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": float("nan")}, "temperature must be in"),
        ({"max_tokens": 2.5}, "max_tokens must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"seed": "x"}, "seed must be an integer or None"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"stop": 5}, "stop must be a text or a list of texts"),
        ({"stop": [5]}, "stop must be a text or a list of texts"),
        ({"stop": ""}, "stop holds an empty text"),
        ({"bad_words": "word"}, "bad_words must be a list of texts"),
        ({"bad_words": [""]}, "bad_words holds an empty text"),
        ({"allowed_token_ids": []}, "allowed_token_ids must hold a token"),
        ({"allowed_token_ids": [320]}, "allowed_token_ids holds token 320"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids must be a list of token ids"),
        ({"n": 0}, "n must be in 1..128"),
        ({"prompt_logprobs": 50}, "prompt_logprobs must be in 0..20"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1"),
        ({"logit_bias": {5: 1.0}}, "logit_bias must be pairs"),
        ({"constraint": "{}"}, "constraint must be one of json_schema"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids must be a list of token ids"),
    ],
    ids=str,
)
def test_parameters_of_a_wrong_type_or_range_are_named(llm: LLM, changes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.generate([[5]], SamplingParams(**changes))


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (5, "prompts: wanted a text"),
        (b"bytes", "prompts: wanted a text"),
        ([5, [6]], "token 5 stands beside"),
        ([[5, "a"]], "a prompt is a text or a list of token ids"),
        ([None], "a prompt is a text or a list of token ids"),
        ([[]], "at least one token"),
        ([""], "at least one token"),
        ([[-1]], "token -1"),
        ([[3] * 1024], "1024 tokens"),
    ],
    ids=str,
)
def test_prompts_of_a_wrong_kind_are_named(llm: LLM, prompts, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.generate(prompts, GREEDY)
    assert llm._loop.unfinished == 0


def test_params_that_are_none_of_ours(llm: LLM) -> None:
    with pytest.raises(RequestError, match="wanted SamplingParams, got dict"):
        llm.generate([[5]], {"temperature": 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": 32}, "dtype must be a text"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be an integer of at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1"),
        ({"num_blocks": 1.5}, "num_blocks must be an integer"),
        ({"nextn": -1}, "nextn must be an integer of at least 0"),
        ({"nextn": 9}, r"nextn must be in 0\.\.7 for this model"),
        ({"prefix_cache_bytes": -1}, "prefix_cache_bytes must be"),
        ({"cache_dir": 5}, "cache_dir must be a text or a path"),
        ({"device": "cuda"}, "a GPU would stay idle; got 'cuda'"),
        ({"device": 0}, "device must be a text"),
    ],
    ids=str,
)
def test_arguments_of_a_wrong_type_or_range_are_named(folder: Path, arguments, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(folder, **arguments)


def test_a_chat_with_the_embedded_model() -> None:
    with LLM(max_num_seqs=2, num_blocks=32) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        ask = [{"role": "user", "content": "Tell me about Ana."}]
        one, two = llm.chat([ask, [*ask, {"role": "assistant", "content": "No."}, *ask]], params)
        assert one.message is not None
        assert one.message["role"] == "assistant"
        assert one.token_ids != two.token_ids
        assert llm.chat(ask, params)[0].token_ids == one.token_ids
        for wrong in ([], "hi", [5]):
            with pytest.raises(RequestError, match="messages: wanted a list of messages"):
                llm.chat(wrong, params)  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            llm.chat([{"role": "nobody", "content": "x"}], params)
