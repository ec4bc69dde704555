"""One request while the scheduler knows it, and the phases it may go through.

    WAITING ──► ADMITTED ──► PREFILLING ──► RUNNING ◄──► PARKED    (one runner does both)
       ▲                              ├──► PREFILLED                 (prefill: until hand-off)
       └── preempted, to be recomputed: its output is read like a prompt ──┘ from RUNNING
    a decode worker's sequences start RUNNING; from every phase ──► FINISHED

Counts: `L = len(tokens)` committed tokens, `N = num_tokens` of them resident as KV. While RUNNING
`N == L - 1`: the last token, the anchor, has not been fed. Drafts are in neither.
"""

from __future__ import annotations

import math
from enum import Enum

from deepinfer_engine.core.constraint import SequenceConstraint
from deepinfer_engine.core.token_log import TokenLog
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
    Phase.ADMITTED: frozenset({Phase.PREFILLING, Phase.WAITING, Phase.FINISHED}),
    Phase.PREFILLING: frozenset({Phase.PREFILLED, Phase.RUNNING, Phase.FINISHED}),
    Phase.PREFILLED: frozenset({Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.PARKED, Phase.WAITING, Phase.FINISHED}),
    Phase.PARKED: frozenset({Phase.RUNNING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class LiveSequence:
    """A request's tokens, memory and counts. The scheduler alone changes it."""

    __slots__ = (
        "aborting",
        "accepted_tokens",
        "ahead",
        "ahead_most",
        "answer_from",
        "arrival",
        "blocked_since",
        "blocks",
        "border_state",
        "constraint",
        "deadline",
        "drafted_tokens",
        "ends",
        "finish_reason",
        "forks",
        "found",
        "key",
        "most_tokens",
        "num_tokens",
        "order",
        "original",
        "overtaken",
        "phase",
        "planned",
        "preemptions",
        "prefix",
        "prompt_len",
        "prompt_logprobs",
        "published_blocks",
        "queued_s",
        "request",
        "state_slot",
        "tokens",
        "users",
        "wanted_borders",
    )

    def __init__(
        self,
        request: GenerateRequest,
        key: str,
        arrival: float,
        constraint: SequenceConstraint | None = None,
    ) -> None:
        self.request = request
        self.constraint = constraint
        """Where the output stands in its grammar; None if any text will do."""
        self.key = key
        """Unique in its engine: the request id, and on a worker the attempt too."""
        self.arrival = arrival
        self.queued_s = 0.0
        """How long it waited for memory, the first time."""
        self.order = 0
        """Rank of arrival; breaks ties."""
        self.tokens: list[int] = TokenLog(request.token_ids)
        self.prompt_len = len(self.tokens)
        """Tokens that are read before the first is sampled: the prompt, and where it was preempted
        and is computed again, its output too."""
        self.answer_from = self.prompt_len - request.resumed
        """Where the output begins: within the prompt, where a lost worker has sampled some."""
        self.num_tokens = 0
        self.planned = 0
        """Tokens of the prompt that are read when all planned steps are over."""
        self.forks: list[LiveSequence] = []
        """Equal prompts that wait until this one is read up to its last token."""
        self.original: LiveSequence | None = None
        """The one among whose forks this is."""
        self.prefix: Prefix = NOTHING
        """What was in place of the tokens that are read, when their reading began."""
        self.found: Prefix | None = None
        """What the prefix cache held of the prompt; a later `prefix` is that of a recomputation."""
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
        self.ends: frozenset[int] = frozenset()
        """Tokens behind which it may end; set with `most_tokens`, of prompt and output, when the
        scheduler takes it."""
        self.most_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.phase = Phase.WAITING
        self.finish_reason: FinishReason | None = None
        self.users = 0
        """Steps and loads that may read or write its memory: until 0 nothing may be freed."""
        self.aborting = False
        self.blocked_since: float | None = None
        self.deadline = arrival + request.timeout_s if request.timeout_s else math.inf
        self.preemptions = 0
        """How often it had to be computed again."""
        self.ahead = 0
        """Least and ..."""
        self.ahead_most = 0
        """... most tokens that steps planned and not yet absorbed will commit."""
        self.overtaken = 0
        """How many later requests were admitted while this one waited at the head."""

    @property
    def in_use(self) -> bool:
        return self.users > 0

    @property
    def salt(self) -> str:
        return self.request.salt

    @property
    def priority(self) -> int:
        return self.request.sampling.priority

    @property
    def cached(self) -> Prefix:
        """What the prefix cache held of the prompt."""
        return self.prefix if self.found is None else self.found

    @property
    def cached_tokens(self) -> int:
        return self.cached.n_tokens

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
            replayed_tokens=self.cached.replayed,
            window=self.cached.window,
        )
