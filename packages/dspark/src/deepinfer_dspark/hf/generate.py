"""`generate`: transformers' own generate with drafts, one line instead of one line.

transformers prepares everything (configuration, logits processors, stopping criteria, streamer) and
calls the loop here in place of its own. A draft is kept while it is the token that the target
picks, greedily or by drawing, so with a fixed torch seed sampled text is that of plain generate as
well, as far as the model's numbers do not depend on the width of a pass.

How many drafts are verified follows from step times learned while running; where drafts do not pay
none is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from deepinfer_dspark.budget import BudgetScheduler
from deepinfer_dspark.drafters.ngram import NGramDrafter
from deepinfer_dspark.drafting import DraftBatch, Drafter
from deepinfer_dspark.errors import LosslessnessError, ShapeError, UnsupportedModelError
from deepinfer_dspark.gate import SpeculationGate
from deepinfer_dspark.hf.single import SingleTarget
from deepinfer_dspark.sampling import SamplingBatch
from deepinfer_dspark.step_table import StepTable
from deepinfer_dspark.step_times import StepTimes
from deepinfer_dspark.torch_extra import Tensor, torch
from deepinfer_dspark.uniforms import CounterRng

N_GRAM_DRAFTS = 16
MARGIN = 0.02
"""Tokens a millisecond that drafts must promise more than a round without."""
FORGET = 512
"""Rounds after which a step time of drafts counts no more: one unlucky trial ends nothing."""
_NOT_KEPT = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class Speculation:
    """What `generate` did: rounds = passes of the target after the prompt's, drafts verified and
    accepted, tokens gained."""

    rounds: int
    verified: int
    accepted: int
    tokens: int


@dataclass(slots=True)
class _Memory:
    """What was learned about one model and one drafter; kept as long as the model lives."""

    times: StepTimes
    scheduler: BudgetScheduler
    gate: SpeculationGate = field(default_factory=lambda: SpeculationGate(margin=MARGIN))
    n_grams: NGramDrafter = field(default_factory=lambda: NGramDrafter(N_GRAM_DRAFTS))


_memories: WeakKeyDictionary[Any, dict[int, _Memory]] = WeakKeyDictionary()


def _memory(model: Any, most: int) -> _Memory:
    """By the model and the most drafts a round."""
    own = _memories.setdefault(model, {})
    if most not in own:
        scheduler = BudgetScheduler(
            StepTable.linear(1.0, 0.02, grid=1, top=most + 1), most, "exact"
        )
        own[most] = _Memory(StepTimes(most + 1, forget=FORGET), scheduler)
    return own[most]


def generate(
    model: Any,
    inputs: Any,
    drafter: Drafter | None = None,
    *,
    speculate: bool = True,
    report: Callable[[Speculation], None] | None = None,
    clock: Callable[[], float] = time.process_time,
    **options: Any,
) -> Any:
    """`model.generate(**inputs, **options)`, faster where drafts come true.

    inputs:    token ids [1, n] or [n], or what a tokenizer returns (`input_ids`, `attention_mask`).
    drafter:   proposes the drafts, run greedily and without the target's hidden states; default
               n-grams of the text itself. A drafter that learns keeps what it learned.
    speculate: False runs the same loop without drafts.
    report:    called once with what was done.
    clock:     seconds; CPU time of the process, since models here run on the CPU and other
               processes must not make a step look slow.
    options:   those of `generate`: generation_config, streamer, max_new_tokens, do_sample,
               logits_processor, stopping_criteria, ...

    Returns what `generate` returns. More than one sequence (a batch, beams, several answers) goes
    to `model.generate` as it is, without drafts. Raises UnsupportedModelError for models that
    cannot take tokens back and for outputs that are not kept (scores, hidden states).
    """
    given: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        raise ShapeError(f"generate wants token ids as a tensor, got {type(ids).__name__}")
    if ids.dim() == 1:
        given["input_ids"] = ids = ids[None]
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise ShapeError(f"generate wants ids [1, n] with n >= 1, got {tuple(ids.shape)}")
    if ids.shape[0] != 1 or not _one_sequence(model, options) or not _unmasked(given):
        return model.generate(**given, **options)
    if set(given) - {"input_ids", "attention_mask", "token_type_ids"}:
        extra = ", ".join(sorted(set(given) - {"input_ids", "attention_mask", "token_type_ids"}))
        raise UnsupportedModelError(f"drafts are for text alone, got inputs {extra}")
    given.pop("token_type_ids", None)
    streamer = options.get("streamer")  # transformers gives it the prompt, the loop the rest
    target = SingleTarget(model)

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **_: Any,
    ) -> Any:
        kept = [n for n in _NOT_KEPT if getattr(generation_config, n, False)]
        if generation_config.return_dict_in_generate and kept:
            raise UnsupportedModelError(f"{', '.join(kept)} are not kept: use model.generate")
        run = _Loop(target, logits_processor, stopping_criteria, generation_config, streamer, clock)
        prompt = input_ids[0].tolist()
        if not speculate:
            text = run.run(prompt, None)
        elif drafter is None:
            memory = _memory(model, N_GRAM_DRAFTS)
            text = run.run(prompt, _Drafting(memory.n_grams, memory, gated=False))
        else:
            memory = _memory(model, drafter.max_tokens)
            text = run.run(prompt, _Drafting(drafter, memory, gated=True))
        if streamer is not None:
            streamer.end()
        if report is not None:
            report(run.speculation)
        sequences = torch.tensor([text], device=input_ids.device)
        if not generation_config.return_dict_in_generate:
            return sequences
        from transformers.generation.utils import (  # pyright: ignore[reportMissingImports]
            GenerateDecoderOnlyOutput,
        )

        named: Any = GenerateDecoderOnlyOutput
        return named(sequences=sequences)

    return model.generate(**given, custom_generate=loop, **options)


def _one_sequence(model: Any, options: Mapping[str, Any]) -> bool:
    config = options.get("generation_config") or model.generation_config
    return all(
        (options.get(name) or getattr(config, name, 1) or 1) == 1
        for name in ("num_beams", "num_return_sequences")
    )


def _unmasked(given: Mapping[str, Any]) -> bool:
    mask = given.get("attention_mask")
    return mask is None or bool((mask == 1).all())


class _Drafting:
    """What to draft for one text, by what was learned about the model and the drafter.

    gated: making drafts costs time that no budget knows, or their confidences are another's word:
    measured rounds decide too. n-grams cost next to nothing and learn their confidences from every
    text, verified or not: for them the budget alone decides, text by text.
    """

    def __init__(self, drafter: Drafter, memory: _Memory, *, gated: bool) -> None:
        self._drafter, self._memory, self._gated = drafter, memory, gated
        self._request, self._sampling, self._rng = object(), SamplingBatch.greedy(1), CounterRng()

    def next(self, text: list[int], rounds: int, room: int, vocab: int) -> list[int]:
        """Drafts to verify; room: the most that can be used."""
        if room < 1:
            return []
        memory = self._memory
        if self._gated and not memory.gate.open(1):
            room = 0  # an n-gram index still follows the text; a model spends no pass
        batch = DraftBatch(
            [self._request], np.array([text[-1]]), np.array([len(text) - 1]), [text],
            self._sampling, np.array([rounds]), wanted=np.array([room]),
        )  # fmt: skip
        proposal = self._drafter.propose(batch, self._rng)
        if not proposal.deterministic:
            raise LosslessnessError(
                "generate runs drafters greedily: they must return q=None for greedy requests"
            )
        n = min(int(proposal.lengths[0]), room)
        if n > 0 and proposal.conf is not None and memory.times.known:
            n = self._worth(proposal.conf, n)
        drafts = proposal.tokens[0, :n].tolist()
        bad = [k for k, t in enumerate(drafts) if not 0 <= t < vocab]
        return drafts[: bad[0]] if bad else drafts

    def _worth(self, conf: Any, n: int) -> int:
        """How many of n drafts promise most tokens a millisecond; none unless by MARGIN."""
        times, scheduler = self._memory.times, self._memory.scheduler
        table = times.table()
        scheduler.retime(table)
        n = min(n, 2 * times.largest - 1)  # a guess about wide passes is not staked on one pass
        n = scheduler.budget(conf, np.array([n]), deterministic=True)
        tokens = 1.0 + float(np.cumprod(np.clip(conf[0, :n], 0.0, 1.0)).sum())
        return n if tokens * table.cost(1) >= (1.0 + MARGIN) * table.cost(1 + n) else 0

    def record(self, drafts: int, tokens: int, ms: float) -> None:
        """How a round went."""
        self._memory.times.record(1 + drafts, ms)
        if self._gated:
            self._memory.gate.record(1, drafts=drafts, tokens=tokens, ms=ms)

    def end(self) -> None:
        """The text is complete, or failed."""
        self._drafter.reset(self._request)


class _Loop:
    """Draft, verify, emit for one sequence."""

    def __init__(
        self,
        target: SingleTarget,
        processors: Any,
        criteria: Any,
        config: Any,
        streamer: Any | None,
        clock: Callable[[], float],
    ) -> None:
        self._target, self._processors, self._streamer = target, processors, streamer
        self._sample = bool(config.do_sample)
        self._clock = clock
        # the two criteria every call has are looked at as integers, the others as tensors
        from transformers.generation.stopping_criteria import (  # pyright: ignore[reportMissingImports]
            EosTokenCriteria,
            MaxLengthCriteria,
        )

        self._eos: set[int] = set()
        self._max_length = int(criteria.max_length or config.max_length)
        self._criteria: list[Any] = []
        for criterion in criteria:
            if isinstance(criterion, EosTokenCriteria):
                self._eos |= set(criterion.eos_token_id.reshape(-1).tolist())
            elif not isinstance(criterion, MaxLengthCriteria):
                self._criteria.append(criterion)
        self.speculation = Speculation(0, 0, 0, 0)

    def run(self, text: list[int], drafting: _Drafting | None) -> list[int]:
        """The prompt with its answer."""
        prompt, rounds, verified, accepted = len(text), 0, 0, 0
        drafts: list[int] = []
        try:
            _, ended = self._emit(text, [], self._target.prefill(text))
            # one reading a round: what process_time costs is no small part of a small model's step
            before = self._clock() if drafting is not None else 0.0
            while not ended:
                if drafting is not None:
                    room = self._max_length - len(text) - 1
                    drafts = drafting.next(text, rounds, room, self._target.vocab_size)
                logits = self._target.forward([text[-1], *drafts], len(text) - 1)
                gained, ended = self._emit(text, drafts, logits)
                rounds, verified = rounds + 1, verified + len(drafts)
                accepted += gained - 1
                if drafting is not None:
                    now = self._clock()
                    drafting.record(len(drafts), gained, (now - before) * 1e3)
                    before = now
        finally:
            if drafting is not None:
                drafting.end()
        self.speculation = Speculation(rounds, verified, accepted, len(text) - prompt)
        return text

    def _emit(self, text: list[int], drafts: list[int], logits: Tensor) -> tuple[int, bool]:
        """Append what the target picks after each kept draft; (tokens gained, whether it ended).

        logits: [1 + drafts, V].
        """
        plain = not self._sample and not len(self._processors)
        picks = logits.argmax(dim=-1).tolist() if plain else []
        for k in range(len(drafts) + 1):
            token = picks[k] if plain else self._pick(text, logits[k : k + 1])
            text.append(token)
            if self._streamer is not None:
                self._streamer.put(torch.tensor([token]))
            if self._ended(text):
                return k + 1, True
            if k < len(drafts) and token != drafts[k]:
                return k + 1, False
        return len(drafts) + 1, False

    def _pick(self, text: list[int], row: Tensor) -> int:
        ids = torch.tensor([text], device=row.device)
        scores = self._processors(ids, row.to(dtype=torch.float32, copy=True))
        if not self._sample:
            return int(scores.argmax(dim=-1))
        return int(torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1))

    def _ended(self, text: list[int]) -> bool:
        if text[-1] in self._eos or len(text) >= self._max_length:
            return True
        if not self._criteria:
            return False
        ids = torch.tensor([text])
        return any(bool(c(ids, None).all()) for c in self._criteria)
