"""What writing one grammar may cost, charged while it is written: a small schema can ask for much.

References and alternatives multiply, and so do counted repetitions in patterns. Each step pays
before it is done, so a schema that asks for too much is refused after a bounded amount of work.
"""

from __future__ import annotations

from deepinfer_recipe.base.errors import GrammarTooComplex
from deepinfer_recipe.grammar.pattern_size import pattern_size

MAX_GRAMMAR_BYTES = 1 << 20
"""Longest text of a grammar, in bytes of UTF-8."""
MAX_NODES = 30_000
"""Parts of all schemas of a request once references and alternatives are written out."""
MAX_STATES = 200_000
"""Steps of all patterns of a request once counted repetitions are written out."""


class Budget:
    """What is left of the limits of one request's grammar. Raises `GrammarTooComplex`."""

    def __init__(
        self,
        *,
        nodes: int = MAX_NODES,
        bytes: int = MAX_GRAMMAR_BYTES,
        states: int = MAX_STATES,
    ) -> None:
        self.nodes = nodes
        self.bytes = bytes
        self.states = states

    def pay_nodes(self, count: int = 1) -> None:
        """Parts of a schema that are about to be looked at or copied."""
        self.nodes -= count
        if self.nodes < 0:
            raise GrammarTooComplex(
                f"the schemas of a request may have {MAX_NODES} parts once their references and "
                "alternatives are written out, and these have more; make them smaller"
            )

    def pay_bytes(self, count: int) -> None:
        """Text that the grammar will hold."""
        self.bytes -= count
        if self.bytes < 0:
            raise GrammarTooComplex(
                f"the grammar of an answer may take {MAX_GRAMMAR_BYTES} bytes, and this one takes "
                "more; send fewer tools or smaller schemas"
            )

    def pay_pattern(self, pattern: str) -> None:
        """A regular expression that the grammar will hold."""
        self.pay_bytes(len(pattern))
        self.states -= pattern_size(pattern).states
        if self.states < 0:
            raise GrammarTooComplex(
                f"the patterns of a request may have {MAX_STATES} steps once their repetitions "
                "are counted out, and these have more; count less in `pattern`"
            )
