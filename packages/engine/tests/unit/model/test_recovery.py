"""A lost window state, rebuilt by running cached tokens again over the stored blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tiny_tokens import tokens

from deepinfer_engine.core.runner import PrefillChunk
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.model.runner import TorchRunner, build_runner

LENGTH = 600
BORDER = 512
EXACT = 1e-11
GREEDY = SamplingParams(temperature=0.0, seed=0, logprobs=0)
WHOLE, AGAIN = list(range(1, 7)), list(range(7, 13))


@dataclass
class Ran:
    """What a prompt left: token and logprob of the first output, blocks, the state at the border
    and behind the prompt."""

    first: tuple[int, float]
    blocks: np.ndarray
    at_border: np.ndarray
    at_end: np.ndarray


def runner(path: Path, mode: str = "off") -> TorchRunner:
    return build_runner(
        path, dtype="float64", num_blocks=16, num_state_slots=6, replay=mode, keep=None
    )


def run(
    made: TorchRunner,
    table: list[int],
    *,
    start: int = 0,
    replayed_to: int = 0,
    snapshot: bool = True,
    prompt_len: int = LENGTH,
) -> Ran:
    """Prompt tokens from `start` on, in chunks that end on no special border."""
    ids, slot, snap = tokens(3, prompt_len), 1, 2
    made.clear_state(slot)
    made.clear_state(snap)
    output, at = None, start
    for end in (*range(start + 200, prompt_len, 200), prompt_len):
        (output,) = made.prefill(
            [
                PrefillChunk(
                    token_ids=ids[at:end],
                    start=at,
                    lookback=tuple(ids[max(0, at - made.caps.lookback) : at].tolist()),
                    block_table=table,
                    state_slot=slot,
                    sampling=GREEDY,
                    sample=end == prompt_len,
                    snapshots=((BORDER, snap),) if snapshot and at < BORDER <= end else (),
                    prompt_len=prompt_len,
                    valid_start=start if replayed_to else 0,
                    entries_from=replayed_to,
                )
            ]
        )
        at = end
    assert output is not None
    return Ran(
        (output.tokens[0], output.logprobs[0].logprob),
        values(b"".join(bytes(made.block_bytes(b)) for b in table)),
        windows(made, snap),
        values(bytes(made.state_bytes(slot))),
    )


def values(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.float64)


def windows(made: TorchRunner, slot: int) -> np.ndarray:
    """The windows of a state; its open groups mean nothing at a border."""
    state = bytes(made.state_bytes(slot))
    rings = [r for r in made.layout.state_regions if r.name == "ring"]
    return values(b"".join(state[r.offset : r.offset + r.nbytes] for r in rings))


def replayed(made: TorchRunner, start: int, prompt_len: int = LENGTH) -> Ran:
    """The same prompt over the stored blocks before the border, without a state."""
    for source, target in zip(WHOLE[: BORDER // 128], AGAIN, strict=False):
        made.block_bytes(target)[:] = made.block_bytes(source)
    return run(made, AGAIN, start=start, replayed_to=BORDER, prompt_len=prompt_len)


def off_by(a: Ran, b: Ran) -> float:
    states = max(
        np.abs(a.at_border - b.at_border).max(initial=0), np.abs(a.at_end - b.at_end).max()
    )
    return max(float(states), float(np.abs(a.blocks - b.blocks).max()))


@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
def test_exact_replay_leaves_what_an_uninterrupted_run_leaves(tiny_dir: Path, mode: str) -> None:
    made = runner(tiny_dir, mode)
    whole = run(made, WHOLE)
    start = made.caps.replay_start(BORDER, LENGTH)
    assert 0 < start < BORDER
    again = replayed(made, start)
    assert off_by(whole, again) < EXACT
    assert whole.first == pytest.approx(again.first, abs=EXACT)
    stored = BORDER // 128 * made.layout.block_bytes // 8
    assert np.array_equal(whole.blocks[:stored], again.blocks[:stored]), "stored entries stay"


def test_a_replay_that_begins_later_is_not_exact(tiny_dir: Path) -> None:
    made = runner(tiny_dir)
    whole = run(made, WHOLE)
    start = made.caps.replay_start(BORDER, LENGTH)
    assert off_by(whole, replayed(made, start + made.caps.exact_replay // 2)) > 1e-6


def test_with_bounded_prompts_it_reaches_back_from_where_all_layers_begin(tiny_dir: Path) -> None:
    """The border lies within the last tokens, of which the upper layers hold windows too."""
    made = runner(tiny_dir, "compact")
    length = BORDER + 40
    whole = run(made, WHOLE, prompt_len=length)
    start = made.caps.replay_start(BORDER, length)
    assert start < BORDER - made.caps.exact_replay
    again = replayed(made, start, length)
    assert off_by(whole, again) < EXACT


def test_bounded_replay_is_near_and_its_difference_is_told(
    tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = runner(tiny_dir)
    whole = run(made, WHOLE)
    again = replayed(made, BORDER - made.caps.window)
    stored = BORDER // 128 * made.layout.block_bytes // 8
    assert np.array_equal(whole.blocks[:stored], again.blocks[:stored]), "stored entries stay"
    difference = abs(whole.first[1] - again.first[1])
    assert off_by(whole, again) > EXACT, "it approximates; the test must see that"
    with capsys.disabled():
        print(f"\nbounded replay: first log probability off by {difference:.2e}")


def test_what_the_replay_of_the_released_model_reads() -> None:
    """128 x 20 tokens at released sizes with bounded prompts, as published."""
    from deepinfer_engine.core.runner import Caps

    caps = Caps(10, 1 << 20, 5, 3, (1,), 8, 8, None, 262, 128, 134, 20)
    assert caps.exact_replay <= 128 * 20
    assert caps.replay_start(4096, 100_000) == 4096 - caps.exact_replay
    assert caps.replay_start(2048, 100_000) == 0, "it would be the whole hit"
    assert caps.replay_start(128, 200) == 0, "a short prompt runs through all layers"
