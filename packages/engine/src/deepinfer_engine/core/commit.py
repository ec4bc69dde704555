"""What a step's outputs make of its sequences: tokens, counts, ends. Memory stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_engine.core.plan import Chunk, Plan
from deepinfer_engine.core.runner import Caps, StepOutput
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.sequences import Sequences
from deepinfer_engine.core.stop import cut_at_stop


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
    drafted = accepted = 0
    caps = at.caps
    for (seq, drafts), output in zip(plan.rows, outputs[n:], strict=True):
        seq.ahead -= 1
        seq.ahead_most -= drafts + 1
        if seq.finish_reason is not None or seq.aborting:
            continue
        if output is None:
            raise RuntimeError(f"the runner returned nothing for {seq.key}")
        total = len(seq.tokens)
        if seq.num_tokens != total - 1:
            raise RuntimeError(f"{seq.key}: {seq.num_tokens} resident of {total} tokens")
        seq.drafted_tokens += output.n_drafted
        seq.accepted_tokens += output.n_accepted
        seq.num_tokens = _append(caps, plan, seq, output, total) - 1
        drafted += output.n_drafted
        accepted += output.n_accepted
    counters["drafted_tokens"] += drafted
    counters["accepted_tokens"] += accepted
    for salt, tokens in plan.generated.items():
        counters["generated_tokens"] += tokens
        at.order.charge(salt, tokens)


def _absorb_chunk(at: Sequences, plan: Plan, chunk: Chunk, output: StepOutput | None) -> None:
    seq = chunk.seq
    seq.num_tokens = chunk.end
    if chunk.sample:
        seq.ahead -= 1
        seq.ahead_most -= 1
    if output is not None:
        seq.prompt_logprobs += output.prompt_logprobs
        if not chunk.sample and seq.request.prompt_logprobs is not None:
            output = None
    if (output is not None) != chunk.sample:
        raise RuntimeError(f"{seq.key}: an output belongs to the last chunk of a prompt alone")
    if output is not None and not seq.aborting:
        if not seq.preemptions:
            at.counters["prompt_tokens"] += seq.prompt_len
        _append(at.caps, plan, seq, output, len(seq.tokens))


def _append(caps: Caps, plan: Plan, seq: LiveSequence, output: StepOutput, total: int) -> int:
    """Commit behind `total` tokens; how many there are then."""
    index, tokens, logprobs = total - seq.answer_from, output.tokens, output.logprobs
    end = total + len(tokens)
    if end >= min(caps.max_model_len, seq.most_tokens) or not seq.ends.isdisjoint(tokens):
        kept, seq.finish_reason = cut_at_stop(
            tokens,
            output_len=index,
            total_len=total,
            sampling=seq.request.sampling,
            eos_token_ids=caps.eos_token_ids,
            max_model_len=caps.max_model_len,
        )
        tokens, end = tokens[:kept], total + kept
    if output.failed and seq.finish_reason is None:
        seq.finish_reason = "error"
    seq.tokens.extend(tokens)
    plan.generated[seq.request.salt] += end - total
    said = logprobs[: end - total] if logprobs else ()
    plan.made.append((seq, index, tokens, said, seq.finish_reason))
    return end
