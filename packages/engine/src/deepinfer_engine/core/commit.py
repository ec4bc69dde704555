"""What a step's outputs make of its sequences. Memory stays as it is.

`absorb` is what the next step must know, tokens and ends, and all that a device may have to wait
for. The rest, counts and what streams are told, is `account`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_engine.core.plan import Chunk, Plan, Progress
from deepinfer_engine.core.runner import StepOutput
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.sequences import Sequences
from deepinfer_engine.core.stop import cut_at_stop
from deepinfer_engine.core.types import FinishReason


def absorb(at: Sequences, plan: Plan, outputs: Sequence[StepOutput | None]) -> None:
    """See `Scheduler.absorb`."""
    n = len(plan.chunks)
    if len(outputs) != n + len(plan.rows):
        raise RuntimeError(f"{len(outputs)} outputs for {n + len(plan.rows)} sequences")
    counters = at.counters
    if plan.chunks:
        counters["prefill_steps"] += 1
        counters["prefill_tokens"] += plan.prompt_tokens
    if plan.rows:
        counters["decode_steps"] += 1
        counters["mixed_steps"] += bool(plan.chunks)
    for chunk, output in zip(plan.chunks, outputs, strict=False):
        _absorb_chunk(at, plan, chunk, output)
    # Behind a long step nothing of a sequence is in the processor's cache: what is true of all rows
    # is not asked of each.
    made, stops, roomy = plan.made, plan.stops, plan.roomy
    go_on = plan.ends == at.ends
    for (seq, _), output in zip(plan.rows, outputs[n:], strict=True):
        if not go_on and (seq.finish_reason is not None or seq.aborting):
            continue
        if output is None:
            raise RuntimeError(f"the runner returned nothing for {seq.key}")
        log, tokens = seq.tokens, output.tokens
        total = len(log)
        if seq.num_tokens != total - 1:
            raise RuntimeError(f"{seq.key}: {seq.num_tokens} resident of {total} tokens")
        finish = None
        if not roomy or output.failed or not stops.isdisjoint(tokens):
            tokens, finish = _cut(at, seq, output, total)
        log += tokens
        seq.num_tokens = total + len(tokens) - 1
        made.append((seq, total, tokens, output, finish))


def account(at: Sequences, plan: Plan) -> list[Progress]:
    """What an absorbed step made, with all that only those hear of who wait for no step."""
    for chunk in plan.chunks:
        if chunk.sample:
            chunk.seq.ahead -= 1
            chunk.seq.ahead_most -= 1
    for seq, drafts in plan.rows:
        seq.ahead -= 1
        seq.ahead_most -= drafts + 1
    drafted = accepted = 0
    generated: dict[str, int] = {}
    progress: list[Progress] = []
    watched = at.tokens.target and not plan.chunks
    for seq, total, tokens, output, finish in plan.made:
        if watched:
            plan.context += total
            plan.verified.append((output.n_drafted, output.n_accepted))
        if output.n_drafted:
            drafted += output.n_drafted
            accepted += output.n_accepted
            seq.drafted_tokens += output.n_drafted
            seq.accepted_tokens += output.n_accepted
        salt, kept = seq.request.salt, len(tokens)
        generated[salt] = generated.get(salt, 0) + kept
        said = output.logprobs
        progress.append(
            Progress(seq, total - seq.answer_from, tokens, said[:kept] if said else (), finish)
        )
    counters = at.counters
    counters["drafted_tokens"] += drafted
    counters["accepted_tokens"] += accepted
    for salt, count in generated.items():
        counters["generated_tokens"] += count
        at.order.charge(salt, count)
    return progress


def _absorb_chunk(at: Sequences, plan: Plan, chunk: Chunk, output: StepOutput | None) -> None:
    seq = chunk.seq
    seq.num_tokens = chunk.end
    if output is not None:
        seq.prompt_logprobs += output.prompt_logprobs
        if not chunk.sample and seq.request.prompt_logprobs is not None:
            output = None
    if (output is not None) != chunk.sample:
        raise RuntimeError(f"{seq.key}: an output belongs to the last chunk of a prompt alone")
    if output is not None and not seq.aborting:
        if not seq.preemptions:
            at.counters["prompt_tokens"] += seq.prompt_len
        total = len(seq.tokens)
        tokens, finish = _cut(at, seq, output, total)
        seq.tokens += tokens
        plan.made.append((seq, total, tokens, output, finish))


def _cut(
    at: Sequences, seq: LiveSequence, output: StepOutput, total: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """What is kept of an output behind `total` tokens, and whether the sequence ends with it."""
    tokens = output.tokens
    if total + len(tokens) >= seq.most_tokens or not seq.ends.isdisjoint(tokens):
        kept, seq.finish_reason = cut_at_stop(
            tokens,
            output_len=total - seq.answer_from,
            total_len=total,
            sampling=seq.request.sampling,
            eos_token_ids=at.caps.eos_token_ids,
            max_model_len=at.caps.max_model_len,
        )
        tokens = tokens[:kept]
    if output.failed and seq.finish_reason is None:
        seq.finish_reason = "error"
    if seq.finish_reason is not None:
        at.ends += 1
    return tokens, seq.finish_reason
