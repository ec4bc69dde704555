"""What turns a request's constraint into something a step can walk.

A decode worker compiles for its own vocabulary, away from the step's thread: in processes that die
with a schema that takes too long. A constraint travels as text. Prefill samples one token only: it
asks decode what that may be, and needs no grammar, library or vocabulary of its own.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Protocol

from deepinfer_engine.core.constraint import CompiledGrammar, ConstraintState
from deepinfer_engine.core.types import Constraint, SamplingParams
from deepinfer_engine.errors import ConstraintError, ConstraintsUnavailable, EngineUnavailable


class GrammarCompiler(Protocol):
    """Compiles grammars; thread-safe."""

    def submit(self, text: str) -> Future[CompiledGrammar]:
        """One text is compiled once. The future raises ConstraintError and its kinds.

        Raises EngineUnavailable when too many wait.
        """
        ...

    def abandon(self, text: str) -> None:
        """Nobody wants this text any more: what compiles it is killed."""
        ...

    def counters(self) -> dict[str, float]: ...

    def gauges(self) -> dict[str, float]: ...

    def close(self) -> None:
        """Kill what compiles."""
        ...


async def constraint_of(
    sampling: SamplingParams, compiler: GrammarCompiler | None
) -> ConstraintState | None:
    """Where a new request stands in its grammar; None if it has none, or may do without.

    Raises ConstraintError, SchemaTooComplex, ConstraintsUnavailable, EngineUnavailable.
    """
    try:
        submitted = _submitted(sampling, compiler)
        if submitted is None:
            return None
        future, constraint = submitted
        waiting = asyncio.wrap_future(future)
        # What becomes of a grammar whose request has gone is nobody's error.
        waiting.add_done_callback(_looked_at)
        # Shielded: others may wait for the same grammar.
        return _state(await asyncio.shield(waiting), constraint)
    except _FAILURES:
        if _needed(sampling):
            raise
        return None


def constraint_of_blocking(
    sampling: SamplingParams, compiler: GrammarCompiler | None
) -> ConstraintState | None:
    """As `constraint_of`, waiting in the caller's thread."""
    try:
        submitted = _submitted(sampling, compiler)
        if submitted is None:
            return None
        future, constraint = submitted
        return _state(future.result(), constraint)
    except _FAILURES:
        if _needed(sampling):
            raise
        return None


def _state(grammar: CompiledGrammar, constraint: Constraint) -> ConstraintState:
    most = constraint.think_tokens
    return ConstraintState(grammar if most is None else grammar.thinking(most), constraint.prefix)


def _looked_at(done: asyncio.Future[CompiledGrammar]) -> None:
    if not done.cancelled():
        done.exception()


_FAILURES = (ConstraintError, ConstraintsUnavailable, EngineUnavailable)


def _needed(sampling: SamplingParams) -> bool:
    """Whether somebody asked that the constraint hold, or it is there for good measure."""
    return sampling.constraint is not None and sampling.constraint.needed


def _submitted(
    sampling: SamplingParams, compiler: GrammarCompiler | None
) -> tuple[Future[CompiledGrammar], Constraint] | None:
    constraint = sampling.constraint
    if constraint is None:
        return None
    if compiler is None:
        if not constraint.needed:
            return None
        raise ConstraintsUnavailable(
            "this engine cannot enforce the format of an answer: xgrammar is not installed where "
            "it runs; in the checkout there: pip install "
            '"./packages/recipe[grammar]" "./packages/engine[grammar]"'
        )
    return compiler.submit(constraint.grammar), constraint
