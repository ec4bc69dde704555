"""Equal prompts at the same time, `n` answers to one above all: read once, then forked.

The first to be admitted is read up to its last token. There the others get its full blocks as
owners beside it, a copy of the block that is not full and of the state, and each runs the last
token itself: its own parameters, its own seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer_engine.core.sequence import LiveSequence, Phase

Prompt = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Copies:
    """(from, to) block ids and state slots, to be copied before either is used."""

    blocks: tuple[tuple[int, int], ...] = ()
    states: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Twins:
    """Which prompts are being read, and who waits for them."""

    _reading: dict[Prompt, LiveSequence] = field(default_factory=dict[Prompt, LiveSequence])

    def original(self, seq: LiveSequence) -> LiveSequence | None:
        """Who reads this prompt already and has not come to its last token."""
        found = self._reading.get(_prompt(seq)) if _forkable(seq) else None
        if found is None or found.planned >= found.prompt_len or found.aborting:
            return None
        return found

    def read(self, seq: LiveSequence) -> None:
        """A prompt begins to be read."""
        if _forkable(seq):
            self._reading[_prompt(seq)] = seq

    def forget(self, seq: LiveSequence) -> None:
        """It is read, or given up."""
        if self._reading.get(_prompt(seq)) is seq:
            del self._reading[_prompt(seq)]

    @staticmethod
    def due(seq: LiveSequence) -> bool:
        """Whether those that wait for it can have what they need."""
        return (
            bool(seq.forks)
            and seq.phase is Phase.PREFILLING
            and not seq.in_use
            and seq.num_tokens == seq.prompt_len - 1
        )


def _forkable(seq: LiveSequence) -> bool:
    request = seq.request
    plain = not request.pictures and request.prompt_logprobs is None
    return plain and not seq.preemptions and seq.prompt_len > 1


def _prompt(seq: LiveSequence) -> Prompt:
    return seq.salt, seq.request.token_ids
