"""Offline use: `LLM(model).generate(prompts, SamplingParams(...))`, like the engines people know.

`generate` steps the engine's loop itself, in the caller's thread: `LLM._drive` is the hot loop.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deepinfer_engine.core.constraint import ConstraintState
from deepinfer_engine.core.device import CPU, Device
from deepinfer_engine.core.grammars import GrammarCompiler, constraint_of_blocking
from deepinfer_engine.core.pictures import Picture, place
from deepinfer_engine.core.plan import Chunk, Progress
from deepinfer_engine.core.types import GenerateRequest
from deepinfer_engine.errors import (
    ConfigError,
    ConstraintsUnavailable,
    EngineLost,
    PromptTooLong,
    RequestError,
)
from deepinfer_engine.offline.answer import Answer
from deepinfer_engine.offline.interrupts import deferred_interrupt
from deepinfer_engine.offline.params import SamplingParams, checked
from deepinfer_engine.offline.progress import progress_bar
from deepinfer_engine.offline.results import Completion, Delta
from deepinfer_engine.offline.rules import TokenRules

if TYPE_CHECKING:
    from deepinfer_engine.core.loop import EngineLoop
    from deepinfer_engine.core.runner import Caps, StepRunner
    from deepinfer_engine.core.votes import VotePolicy
    from deepinfer_engine.kv.connector import KVConnector
    from deepinfer_engine.model.family import CacheQuant, ReplayMode
    from deepinfer_engine.offline.build import EngineSpec
    from deepinfer_engine.offline.chat import ChatCodec
    from deepinfer_engine.parallel.replica import ReplicaGroup

Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class _Job:
    """One answer to make."""

    request: GenerateRequest
    constraint: ConstraintState | None
    answer: Answer


class LLM:
    """One model in this process: prompts in, completions out, continuously batched.

    model: a model directory, a .gguf file, `smollm2` (after `deepinfer pull smollm2`), or
        `org/name` of the Hugging Face hub; None is the embedded demo model.
    dtype: "float32", "bfloat16" or "float64". nextn: drafts a step, 0 = no speculation.
    replay: "compact" runs only the end of a prompt through all layers (approximate).
    cache_dir: keep prompt caches there, shared with servers that use the same model and
        directory; None keeps them in this process, in `prefix_cache_bytes` (0 = not at all).
    num_blocks: KV blocks of 128 tokens; None: 1024, or as many as 2 GiB hold.
    batch_invariant: a token's logits have the same bits in any batch: greedy and seeded text is
        then the same in any company in float32 and bfloat16 too. Slower.
    dp: processes that each run some of the prompts and share the model's experts (V4.1); sizes
        above are those of each. To be made from the main thread. vote_policy: when the group reads
        prompts beside running answers, see `core.votes.Vote`.

    Thread-safe. Raises CheckpointError or ConfigError. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "float32",
        nextn: int | None = None,
        cache_quant: CacheQuant = "reference",
        replay: ReplayMode = "off",
        cache_dir: str | Path | None = None,
        prefix_cache_bytes: int = 512 << 20,
        max_num_seqs: int = 16,
        num_blocks: int | None = None,
        device: str = CPU.name,
        batch_invariant: bool = False,
        dp: int = 1,
        vote_policy: VotePolicy = "urgent",
    ) -> None:
        _check_arguments(model, cache_dir, locals())
        # Here and not above: importing the package must not import torch.
        from deepinfer_engine.codec.pictures import PictureIntake, PicturePolicy
        from deepinfer_engine.model.files import load_tokenizer
        from deepinfer_engine.model.names import model_directory
        from deepinfer_engine.offline.build import EngineSpec

        Device.parse(device)
        self._directory = directory = model_directory(model)
        self._tokenizer = load_tokenizer(directory)
        spec = EngineSpec(
            directory=str(directory),
            dtype=dtype,
            nextn=nextn,
            cache_quant=cache_quant,
            replay=replay,
            cache_dir=None if cache_dir is None else str(cache_dir),
            prefix_cache_bytes=prefix_cache_bytes,
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            device=device,
            batch_invariant=batch_invariant,
            vote_policy=vote_policy,
        )
        self._group: ReplicaGroup | None = None
        runner, self._connector, self._loop = self._built(spec, dp)
        self._caps = runner.caps
        self._intake = PictureIntake.of_directory(directory, PicturePolicy())
        self._grammars = _grammars(directory, runner.caps)
        self._window = 4 * max_num_seqs * dp
        """Prompts in the engine at a time: further ones wait here and cost nothing."""
        self._answers: dict[str, Answer] = {}
        self._stepping = threading.Lock()
        self._codec: ChatCodec | None = None
        self._failure: BaseException | None = None
        self._closed = False

    def _built(
        self, spec: EngineSpec, dp: int
    ) -> tuple[StepRunner, KVConnector | None, EngineLoop]:
        from deepinfer_engine.core.loop import EngineLoop
        from deepinfer_engine.offline.build import build_engine

        if dp == 1:
            return build_engine(spec, EngineLoop, sink=self)
        from deepinfer_engine.core.votes import Vote
        from deepinfer_engine.offline.replicas import DEADLINE_S, ReplicaLoop, replica_group
        from deepinfer_engine.parallel.ballot import GlooBallot

        self._group = group = replica_group(spec, dp, DEADLINE_S)
        try:
            vote = Vote(dp, spec.vote_policy)
            return build_engine(
                spec, ReplicaLoop, group, sink=self, ballot=GlooBallot(), vote=vote, group=group
            )
        except BaseException:
            group.close()
            raise

    # -- what is asked of it --------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        images: Sequence[Sequence[bytes | str | Path]] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continue every prompt; results in the order of the prompts.

        prompts: texts (encoded as they are, special tokens recognised) or lists of token ids; one
            prompt alone is allowed. params: one set for all, or one a prompt; an unset seed is
            drawn for each.
        images: the pictures of each prompt, for a model with a vision tower: encoded bytes or the
            path of a file (WebP, PNG, JPEG, GIF). The prompt holds one image token for each.
        progress: show a bar; None: on a terminal, for several prompts.

        Raises RequestError before anything runs when a prompt cannot be served; ConstraintError,
        SchemaTooComplex or ConstraintsUnavailable when `params.constraint` cannot be enforced.
        Ctrl-C ends the requests of this call and raises KeyboardInterrupt.
        """
        jobs = self._jobs("generate", prompts, params, images)
        with progress_bar(len(jobs), progress) as tell:
            for _ in self._drive(jobs):
                tell(sum(job.answer.over for job in jobs), self._loop)
        return _in_order([job.answer for job in jobs])

    def stream(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        images: Sequence[Sequence[bytes | str | Path]] | None = None,
    ) -> Iterator[Delta]:
        """As `generate`, piece by piece; the last piece of an answer holds its `completion`.

        Leaving the iterator ends what still runs.
        """
        return self._pieces(self._jobs("stream", prompts, params, images))

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: Params = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        thinking: bool | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Answer a conversation, or several, in the form of Chat Completions.

        tools: as in Chat Completions; calls are in `Completion.message`. thinking: None is the
        model's default. Raises as `generate`.
        """
        if self._codec is None:
            from deepinfer_engine.offline.chat import ChatCodec

            self._codec = ChatCodec(self._directory, self._caps.max_model_len)
        conversations = self._codec.conversations(messages)
        sets = _for_each(params, len(conversations))
        prepared = [
            self._codec.prepare(c, p, tools, thinking)
            for c, p in zip(conversations, sets, strict=True)
        ]
        done = self.generate(
            [p.token_ids for p in prepared], [p.params for p in prepared], progress=progress
        )
        return [p.finished(c) for p, c in zip(prepared, done, strict=True)]

    def close(self) -> None:
        """Stop the engine; harmless twice."""
        if self._closed:
            return
        self._closed = True
        with self._stepping:
            self._loop.abort_all("error")
        if self._connector is not None:
            self._connector.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._group is not None:
            self._group.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the hot loop ---------------------------------------------------------------------------

    def _drive(self, jobs: Sequence[_Job]) -> Generator[None]:
        """Run until every answer is over; yields after each step. Leaving it aborts the rest."""
        waiting, live = deque(jobs), list[_Job]()
        try:
            while waiting or live:
                while waiting and len(live) < self._window:
                    live.append(waiting.popleft())
                    self._submit(live[-1])
                with self._stepping:
                    if self._failure is not None or self._closed:
                        raise EngineLost(f"the engine has stopped: {self._failure or 'closed'}")
                    if not any(job.answer.over for job in live):  # another thread's step was ours
                        with deferred_interrupt(self._loop.wake):
                            try:
                                if self._loop.step(time.monotonic()) is None:
                                    self._loop.wait_for_work()
                            except BaseException as error:
                                self._failure = error
                                self._loop.abort_all("error")
                                raise EngineLost(f"a step failed: {error}") from error
                yield
                live = [job for job in live if not job.answer.over]
        finally:
            for job in jobs:
                if not job.answer.over:
                    self._loop.abort(job.request.request_id)
                self._answers.pop(job.request.request_id, None)

    def _submit(self, job: _Job) -> None:
        key = job.request.request_id
        self._answers[key] = job.answer
        self._loop.submit(job.request, key, time.monotonic(), job.constraint)

    def _pieces(self, jobs: Sequence[_Job]) -> Iterator[Delta]:
        for _ in self._drive(jobs):
            for job in jobs:
                answer = job.answer
                if not answer.fresh:
                    continue
                text, tokens, logprobs = answer.piece()
                done = answer.completion() if answer.over else None
                yield Delta(answer.index, answer.number, text, tokens, logprobs, done)

    # -- Sink of the loop -----------------------------------------------------------------------

    def chunk_done(self, chunk: Chunk) -> None:
        """Prefill and decode share their memory here: nothing has to be sent."""

    def progress(self, progress: Progress) -> None:
        """Take what a step made of one sequence."""
        answer = self._answers.get(progress.seq.key)
        if answer is not None and answer.take(progress):
            self._loop.abort(progress.seq.key)

    # -- prompts to jobs ------------------------------------------------------------------------

    def _jobs(
        self,
        what: str,
        prompts: Prompts,
        params: Params,
        images: Sequence[Sequence[bytes | str | Path]] | None = None,
    ) -> list[_Job]:
        if self._closed:
            raise RequestError(f"{what}: this LLM is closed")
        given = _as_list(prompts)
        sets = [checked(p, self._caps.vocab_size) for p in _for_each(params, len(given))]
        if images is not None and len(images) != len(given):
            raise RequestError(
                f"images: wanted one list of pictures for each of {len(given)} prompts, got "
                f"{len(images)}"
            )
        jobs: list[_Job] = []
        for i, (prompt, own) in enumerate(zip(given, sets, strict=True)):
            ids = self._encode(prompt, own)
            jobs += self._answers_to(i, ids, own, images[i] if images else ())
        return jobs

    def _encode(self, prompt: str | Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        if isinstance(prompt, str):
            ids = tuple(self._tokenizer.encode(prompt, add_special_tokens=False).ids)
        else:
            ids = tuple(prompt)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        if not ids:
            raise RequestError("a prompt must hold at least one token")
        wrong = next((t for t in ids if not 0 <= t < self._caps.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"a prompt holds token {wrong}; this model's ids are 0..{self._caps.vocab_size - 1}"
            )
        return ids

    def _answers_to(
        self,
        index: int,
        ids: tuple[int, ...],
        params: SamplingParams,
        images: Sequence[bytes | str | Path],
    ) -> list[_Job]:
        pictures: tuple[Picture, ...] = ()
        if images:
            ids, pictures = self._with_pictures(ids, images)
        if len(ids) >= self._caps.max_model_len:
            raise PromptTooLong(len(ids), self._caps.max_model_len - 1)
        self._loop.scheduler.check_fits(len(ids))
        seed = secrets.randbits(63) if params.seed is None else params.seed
        jobs: list[_Job] = []
        for number in range(params.n):
            request = GenerateRequest(
                request_id=f"llm-{secrets.token_hex(8)}",
                token_ids=ids,
                # Far apart: neighbours would be the seeds of other prompts.
                sampling=params.engine((seed + number * 0x9E3779B97F4A7C15) % 2**63),
                pictures=pictures,
                prompt_logprobs=params.prompt_logprobs,
            )
            answer = Answer(index, number, params, self._tokenizer)
            jobs.append(_Job(request, self._constraint(params), answer))
        return jobs

    def _constraint(self, params: SamplingParams) -> ConstraintState | None:
        state = constraint_of_blocking(params, self._grammars)
        if params.allowed_token_ids is None and not params.bad_words:
            return state
        inner = None if state is None else state.grammar
        prefix = "" if params.constraint is None else params.constraint.prefix
        banned = [run for word in params.bad_words for run in self._spellings(word)]
        rules = TokenRules(self._caps.vocab_size, params.allowed_token_ids, banned, inner)
        return ConstraintState(rules, prefix)

    def _spellings(self, word: str) -> set[tuple[int, ...]]:
        """Token runs of a word at the start of a text and behind a space."""
        encode = self._tokenizer.encode
        return {
            tuple(encode(form, add_special_tokens=False).ids)
            for form in (word, " " + word.lstrip())
        }

    def _with_pictures(
        self, ids: tuple[int, ...], images: Sequence[bytes | str | Path]
    ) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        if self._intake is None:
            raise RequestError("this model takes no pictures; send text alone")
        try:
            encoded = [i if isinstance(i, bytes) else Path(i).read_bytes() for i in images]
        except OSError as error:
            raise RequestError(f"cannot read a picture: {error}") from error
        return place(ids, self._intake.of_bytes(encoded), self._intake.rules)


def _check_arguments(model: object, cache_dir: object, given: dict[str, Any]) -> None:
    """Types first: a slip must not become an error deep inside."""
    for name, value in (("model", model), ("cache_dir", cache_dir)):
        if value is not None and not isinstance(value, str | Path):
            raise ConfigError(f"{name} must be a text or a path, got {value!r}")
    for name in ("dtype", "cache_quant", "replay", "device"):
        if not isinstance(given[name], str):
            raise ConfigError(f"{name} must be a text, got {given[name]!r}")
    if not isinstance(given["batch_invariant"], bool):
        raise ConfigError(
            f"batch_invariant must be True or False, got {given['batch_invariant']!r}"
        )
    if given["vote_policy"] not in ("urgent", "upstream"):
        raise ConfigError(
            f"vote_policy must be 'urgent' or 'upstream', got {given['vote_policy']!r}"
        )
    for name, least in (
        ("nextn", 0), ("max_num_seqs", 1), ("num_blocks", 2), ("prefix_cache_bytes", 0), ("dp", 1),
    ):  # fmt: skip
        value = given[name]
        if value is None and name in ("nextn", "num_blocks"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")


def _grammars(model_dir: Path, caps: Caps) -> GrammarCompiler | None:
    """The compiler of constraints; None where xgrammar is not installed. Loads nothing yet."""
    from deepinfer_engine.codec.choose import open_grammars

    try:
        return open_grammars(model_dir, caps.vocab_size)
    except ConstraintsUnavailable:
        return None


def _in_order(answers: Sequence[Answer]) -> list[Completion]:
    """One completion a prompt, further answers inside it."""
    from dataclasses import replace

    made: dict[int, list[Completion]] = {}
    for answer in answers:
        made.setdefault(answer.index, []).append(answer.completion())
    return [replace(first, others=tuple(others)) for first, *others in made.values()]


def _for_each(params: Params, count: int) -> list[SamplingParams]:
    """One set of parameters a prompt."""
    if params is None:
        return [SamplingParams()] * count
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"params: wanted one set, or one for each of {count} prompts, got {len(params)}"
        )
    return list(params)


def _as_list(prompts: Any) -> list[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            f"prompts: wanted a text, token ids, or a list of those, got {type(prompts).__name__}"
        )
    items: list[Any] = list(prompts)
    if items and all(_is_token(p) for p in items):
        return [items]
    for item in items:
        if _is_token(item):
            raise RequestError(
                f"prompts: token {item} stands beside whole prompts; put it in a list"
            )
        if isinstance(item, str):
            continue
        if not isinstance(item, Sequence) or not all(_is_token(t) for t in item):
            raise RequestError(
                f"prompts: a prompt is a text or a list of token ids, got {str(item)[:60]!r}"
            )
    return items


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
