"""Days of synthetic load: what an hour of trace cannot say about lifetimes of days.

Conversations start at a steady rate. Each one is a sequence of sittings; within a sitting turns
follow after log-normal pauses, and some sittings are followed by another one hours or days later
(log-normal again: the long tail). A prompt is a system prompt, popular ones more often (Zipf), and
everything said before in the conversation.

The numbers below are assumptions, chosen to resemble what is said in public about such traffic.
The load can show in which direction a lifetime moves the hit rate; it cannot show by how much it
would move on somebody's real traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.simulation.trace import Request

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Habit:
    """How conversations of one class go.

    share:           of all conversations.
    turns:           mean number of turns in a sitting (geometric).
    pause_s, pause_sigma: median and log-standard deviation of the pause between two turns.
    returns:         probability that a sitting is followed by another one.
    away_s, away_sigma: median and log-standard deviation of the time until then.
    turn_blocks:     mean blocks that a turn adds to the conversation (geometric).
    system_blocks:   blocks of the system prompt.
    system_prompts:  how many different ones there are.
    """

    share: float
    turns: float
    pause_s: float
    pause_sigma: float
    returns: float
    away_s: float
    away_sigma: float
    turn_blocks: float
    system_blocks: int
    system_prompts: int


DEFAULT_HABITS: dict[str, Habit] = {
    "chat": Habit(0.6, 4.0, 90.0, 1.0, 0.30, 20 * 3600.0, 1.5, 2.0, 2, 400),
    "agent": Habit(0.4, 12.0, 8.0, 1.2, 0.12, 2 * 3600.0, 1.5, 3.0, 12, 80),
}


@dataclass(frozen=True, slots=True)
class StretchLoad:
    """Everything that decides the load; equal values give equal requests.

    days:             length, warm-up included.
    sessions_per_day: conversations that start each day.
    block_tokens:     tokens of one block.
    zipf:             exponent of the popularity of system prompts.
    """

    days: float = 21.0
    sessions_per_day: int = 600
    block_tokens: int = 512
    zipf: float = 1.1
    seed: int = 1
    habits: dict[str, Habit] = field(default_factory=lambda: dict(DEFAULT_HABITS))

    def __post_init__(self) -> None:
        if self.days <= 0 or self.sessions_per_day < 1 or self.block_tokens < 1:
            raise ConfigError(
                "days, sessions_per_day and block_tokens must be above 0, got"
                f" {self.days}, {self.sessions_per_day}, {self.block_tokens}"
            )


def generate(load: StretchLoad) -> list[Request]:
    """The requests of a load, in order of arrival."""
    random = np.random.default_rng(load.seed)
    names = list(load.habits)
    shares = np.array([habit.share for habit in load.habits.values()])
    systems, next_block = _system_prompts(load)
    popularity = {name: _zipf(load.habits[name].system_prompts, load.zipf) for name in names}
    requests: list[Request] = []
    count = int(load.days * load.sessions_per_day)
    starts = np.sort(random.uniform(0, load.days * DAY_S, count))
    for start in starts:
        name = names[random.choice(len(names), p=shares / shares.sum())]
        habit = load.habits[name]
        prompt = int(random.choice(habit.system_prompts, p=popularity[name]))
        chain = list(systems[name, prompt])
        at = float(start)
        while at < load.days * DAY_S:
            for turn in range(int(random.geometric(1 / habit.turns))):
                if turn:
                    at += habit.pause_s * float(random.lognormal(0, habit.pause_sigma))
                grown = int(random.geometric(1 / habit.turn_blocks))
                chain.extend(range(next_block, next_block + grown))
                next_block += grown
                if at < load.days * DAY_S:
                    tokens = len(chain) * load.block_tokens
                    requests.append(Request(at, tokens, tuple(chain), name))
            if random.random() >= habit.returns:
                break
            at += habit.away_s * float(random.lognormal(0, habit.away_sigma))
    requests.sort(key=lambda request: request.at_s)
    return requests


def _system_prompts(load: StretchLoad) -> tuple[dict[tuple[str, int], range], int]:
    """Block ids of every system prompt, and the first id that is free after them."""
    prompts: dict[tuple[str, int], range] = {}
    first = 0
    for name, habit in load.habits.items():
        for number in range(habit.system_prompts):
            prompts[name, number] = range(first, first + habit.system_blocks)
            first += habit.system_blocks
    return prompts, first


def _zipf(count: int, exponent: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    return weights / weights.sum()
