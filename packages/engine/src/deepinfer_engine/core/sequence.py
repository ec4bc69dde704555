"""One request while the scheduler knows it, and the phases it may go through.

    WAITING ──► ADMITTED ──► PREFILLING ──► RUNNING ◄──► PARKED    (one runner does both)
                                      └──► PREFILLED                 (prefill: until hand-off)
    a decode worker's sequences start RUNNING; from every phase ──► FINISHED

Counts: `L = len(tokens)` committed tokens, `N = num_tokens` of them resident as KV. While RUNNING
`N == L - 1`: the last token, the anchor, has not been fed. Drafts are in neither.
"""

from __future__ import annotations

from enum import Enum

from deepinfer_engine.core.constraint import ConstraintState
from deepinfer_engine.core.types import FinishReason, GenerateRequest, TokenLogprob, Usage
from deepinfer_engine.core.windows import NOTHING, Prefix


class Phase(Enum):
    WAITING = "waiting"
    ADMITTED = "admitted"
    """Owns blocks and a slot; its cached prefix is being looked up or loaded."""
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    RUNNING = "running"
    PARKED = "parked"
    """Preempted: its bytes are in host memory, it owns no block and no slot."""
    FINISHED = "finished"


LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.ADMITTED, Phase.FINISHED}),
    Phase.ADMITTED: frozenset({Phase.PREFILLING, Phase.FINISHED}),
    Phase.PREFILLING: frozenset({Phase.PREFILLED, Phase.RUNNING, Phase.FINISHED}),
    Phase.PREFILLED: frozenset({Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.PARKED, Phase.FINISHED}),
    Phase.PARKED: frozenset({Phase.RUNNING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class LiveSequence:
    """A request's tokens, memory and counts. The scheduler alone changes it."""

    __slots__ = (
        "aborting",
        "accepted_tokens",
        "answer_from",
        "arrival",
        "blocked_since",
        "blocks",
        "border_state",
        "constraint",
        "drafted_tokens",
        "finish_reason",
        "fresh",
        "fresh_logprobs",
        "in_use",
        "key",
        "num_tokens",
        "order",
        "overtaken",
        "phase",
        "prefix",
        "prompt_len",
        "prompt_logprobs",
        "published_blocks",
        "request",
        "state_slot",
        "tokens",
        "wanted_borders",
    )

    def __init__(
        self,
        request: GenerateRequest,
        key: str,
        arrival: float,
        constraint: ConstraintState | None = None,
    ) -> None:
        self.request = request
        self.constraint = constraint
        """Where the output stands in its grammar; None if any text will do."""
        self.key = key
        """Unique in its engine: the request id, and on a worker the attempt too."""
        self.arrival = arrival
        self.order = 0
        """Rank of arrival; breaks ties."""
        self.tokens: list[int] = list(request.token_ids)
        self.prompt_len = len(self.tokens)
        self.answer_from = self.prompt_len - request.resumed
        """Where the output begins: within the prompt, where a lost worker has sampled some."""
        self.num_tokens = 0
        self.prefix: Prefix = NOTHING
        """What the prefix cache held of the prompt."""
        self.border_state: tuple[int, bytes] | None = None
        """The last border of the answer and its state, where that is stored at the end."""
        self.blocks: list[int] = []
        self.state_slot = 0
        self.published_blocks = 0
        """Leading blocks the prefix store has been offered already."""
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the prompt tokens behind the first, as far as they were computed and wanted."""
        self.wanted_borders: set[int] = set()
        """Block borders whose state others wait for."""
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.phase = Phase.WAITING
        self.finish_reason: FinishReason | None = None
        self.in_use = False
        """A step or a load may read or write its memory: nothing may be freed now."""
        self.aborting = False
        self.blocked_since: float | None = None
        self.overtaken = 0
        """How many later requests were admitted while this one waited at the head."""
        self.fresh: tuple[int, ...] = ()
        """Tokens of the step that has been absorbed but not settled, and their logprobs."""
        self.fresh_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def cached_tokens(self) -> int:
        return self.prefix.n_tokens

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.answer_from

    def to(self, phase: Phase) -> None:
        """Change phase; a transition that is not in the drawing is a bug."""
        if phase not in LEGAL[self.phase]:
            raise RuntimeError(
                f"sequence {self.key}: {self.phase.value} cannot become {phase.value}"
            )
        self.phase = phase

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.answer_from,
            completion_tokens=self.output_len,
            cached_tokens=min(self.cached_tokens, self.answer_from),
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            replayed_tokens=self.prefix.replayed,
            window=self.prefix.window,
        )
