"""Ranks join, leave and are lost: plans that keep what there is, and weights that follow."""

from __future__ import annotations

import lossy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_eplb import (
    CommitError,
    EplbError,
    LoadWindow,
    PlanError,
    TransportError,
    evaluate,
    plan,
    replan,
    resize,
    resize_layer,
)
from deepinfer_eplb.bench.loads import generate

L, E = 2, 24


def loads(seed: int = 1) -> np.ndarray:
    return generate("skew", seed, steps=40, layers=L, experts=E, tokens=2000).counts


@st.composite
def changes(draw):
    """(old ranks, slots a rank, new ranks, slots a rank, old rank of each new one)."""
    before, after = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    C, D = (-(-E // n) + draw(st.integers(0, 3)) for n in (before, after))
    pool = draw(st.permutations([*range(before), *[-1] * after]))
    return before, C, after, D, pool[:after]


@given(changes(), st.integers(0, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_change_of_topology_has_a_valid_plan_that_keeps_what_it_can(
    case, seed, still
) -> None:
    before, C, after, D, ranks = case
    old = plan(loads(seed)[:20], before, before * C).phy2log
    window = loads(seed)[20:]
    if still:
        window = window.mean(axis=0, keepdims=True).repeat(window.shape[0], axis=0)
    made = plan(window, after, after * D, old, old_gpus=before, ranks=ranks)
    assert made.phy2log.shape == (L, after * D)
    assert made.logcnt.min() >= 1
    held = old.reshape(L, before, C)
    arrivals = 0
    for layer in range(L):
        for g, r in enumerate(ranks):
            there = held[layer, r].tolist() if r >= 0 else []
            for e in made.phy2log[layer].reshape(after, D)[g].tolist():
                if e in there:
                    there.remove(e)
                else:
                    arrivals += 1
    assert made.moved == pytest.approx(arrivals / (L * after * D))
    assert made.old_B is None


@pytest.mark.parametrize(("before", "C", "after", "D"), [(12, 2, 8, 3), (16, 3, 12, 3)])
def test_few_slots_a_rank_shrink_on_loads_that_stand_still(before, C, after, D) -> None:
    """What is left of the old placement lacks experts: it is no rival of the plan."""
    window = loads().mean(axis=0, keepdims=True).repeat(20, axis=0)
    old = plan(window, before, before * C).phy2log
    made = plan(window, after, after * D, old, old_gpus=before, ranks=range(after))
    assert made.logcnt.min() >= 1


@pytest.mark.parametrize(
    ("name", "after", "ranks"),
    [
        ("scale up", 10, [*range(8), -1, -1]),
        ("scale down", 6, [*range(6)]),
        ("lost rank", 7, [0, 1, 2, 4, 5, 6, 7]),
    ],
)
def test_little_moves_beyond_what_must_and_balance_is_near_that_of_a_plan_from_nothing(
    name, after, ranks
) -> None:
    trace = generate("skew", 3, steps=300, layers=4, experts=64, tokens=8000)
    old = plan(trace.counts[:100], 8, 88).phy2log  # 11 slots a rank
    window, truth = trace.counts[100:200], trace.expected[200:]
    made = plan(window, after, after * 11, old, old_gpus=8, ranks=ranks)
    anew = plan(window, after, after * 11)
    # what has to arrive: all slots of newcomers, or one of each expert that nobody holds any more
    if name == "scale up":
        must = 2 * 11 * 4
    else:
        kept = old.reshape(4, 8, 11)[:, ranks].reshape(4, -1)
        must = sum(64 - len(set(row)) for row in kept.tolist())
    arrived = made.moved * 4 * after * 11
    assert must <= arrived <= must + 0.15 * 4 * after * 11
    ours, best = (evaluate(truth, p.phy2log, after).B for p in (made, anew))
    assert ours < best + 0.04, (name, ours, best)


def test_the_same_number_of_ranks_in_another_order_moves_nothing() -> None:
    old = plan(loads(), 4, 28).phy2log
    ranks = [2, 0, 3, 1]
    made = plan(loads(), 4, 28, old, ranks=ranks, max_swaps=0)
    assert made.moved == 0.0
    assert np.array_equal(
        np.sort(made.phy2log.reshape(L, 4, 7)), np.sort(old.reshape(L, 4, 7)[:, ranks])
    )


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"old_gpus": 5}, "5 old_gpus share"),
        ({"old_gpus": 4, "ranks": [0, 1]}, "wants 3 old ranks"),
        ({"old_gpus": 4, "ranks": [0, 0, 1]}, "each once"),
        ({"old_gpus": 4, "ranks": [0, 1, 4]}, r"0\.\.3"),
        ({"old_gpus": 4, "ranks": [0, 1, -2]}, "at least -1"),
        ({"old_gpus": 4, "ranks": [0.5, 1, 2]}, "ranks wants an integer"),
        ({"old_gpus": 0}, "old_gpus wants an integer"),
        ({}, "say old_gpus"),
    ],
)
def test_topologies_that_do_not_fit_are_refused_by_name(named, says) -> None:
    old = plan(loads(), 4, 28).phy2log
    with pytest.raises(EplbError, match=says):
        plan(loads(), 3, 24, old, **named)


@given(changes(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_resize_fills_every_new_slot_from_a_holder_or_names_it_to_load(case, buckets) -> None:
    before, C, after, D, ranks = case
    old = plan(loads()[:20], before, before * C).phy2log[0]
    new = plan(loads()[20:], after, after * D).phy2log[0]
    leaving = [r for r in range(before) if r not in ranks][:1]
    moves = resize(old, new, before, after, ranks, leaving, buckets=buckets)
    rows = np.full(moves.new.shape, -1)
    for p, me in enumerate(moves.ranks):
        for src, dst in me.copies:
            rows[p, dst] = moves.old[p, src]
        for bucket in me.buckets:
            for t in bucket:
                assert moves.old[t.src, t.src_slot] == t.expert
                rows[t.dst, t.dst_slot] = t.expert
        for expert, slot in moves.load[p]:
            assert not (moves.old == expert).any()
            rows[p, slot] = expert
        for src, dst in me.final_copies:
            rows[p, dst] = rows[p, src]
    assert np.array_equal(rows, moves.new)


def rows_of(held, width: int = 3):
    """Weights that carry their expert's id: a matrix and a vector."""
    held = np.asarray(held)
    return [np.repeat(held[:, None], width, axis=1).astype(np.float32), held * 7]


def run_change(before, C, after, D, ranks, leaving, fail=None, death=None):
    """All processes replan and resize every layer; returns what each ended with."""
    old = plan(loads()[:20], before, before * C).phy2log
    held = old.reshape(L, before, C)
    window = LoadWindow(L, E, blocks=20, steps_per_block=1)
    for step in loads()[20:]:
        window.add(step, np.tile(np.arange(E), (L, 1)))

    def body(transport):
        was = [*ranks, *leaving][transport.rank]
        here = None if was < 0 else window
        placed, made = replan(
            transport, L, E, after, after * D, ranks, old_gpus=before,
            old=None if was < 0 else old, window=here,
        )  # fmt: skip
        assert np.array_equal(placed, old)
        weights = [] if was < 0 else [rows_of(held[layer, was]) for layer in range(L)]
        kept = [[w.copy() for w in layer] for layer in weights]
        fresh, error = [], None
        for layer in range(L):
            moves = resize(placed[layer], made.phy2log[layer], before, after, ranks, leaving)
            stays = transport.rank < after
            target = [np.zeros((D, 3), np.float32), np.zeros(D, held.dtype)] if stays else []

            def load(expert):
                if fail is not None and transport.rank == fail:
                    raise OSError("checkpoint gone")
                return [w[0] for w in rows_of([expert])]

            try:
                resize_layer(moves, weights[layer] if weights else [], target, transport, load)
            except EplbError as e:
                error = e
                break
            fresh.append(target)
        for a, b in zip(weights, kept, strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        return made, fresh, error

    return lossy.run(len(ranks) + len(leaving), body, death)


CASES = {
    "scale up": (3, 9, 5, 6, [0, 1, 2, -1, -1], []),
    "scale down": (5, 6, 3, 9, [0, 2, 3], [1, 4]),
    "lost rank": (4, 7, 3, 9, [0, 1, 3], []),
    "swap a rank": (4, 7, 4, 7, [0, -1, 2, 3], [1]),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_follow_the_plan_on_every_process(name: str) -> None:
    before, C, after, D, ranks, leaving = CASES[name]
    results, _ = run_change(before, C, after, D, ranks, leaving)
    first = results[0][0]
    for g, (made, fresh, error) in enumerate(results):
        assert error is None
        assert made.phy2log.tobytes() == first.phy2log.tobytes()
        if g < after:
            for layer in range(L):
                expected = rows_of(made.phy2log[layer].reshape(after, D)[g])
                for a, b in zip(fresh[layer], expected, strict=True):
                    assert np.array_equal(a, b)
    assert first.moved < 0.75


def test_a_checkpoint_that_fails_on_one_rank_stops_all_with_the_old_weights_whole() -> None:
    case = CASES["lost rank"]
    for fail in range(3):
        results, _ = run_change(*case, fail=fail)
        errors = [error for _, _, error in results]
        if any(errors):
            assert all(isinstance(e, CommitError) for e in errors)
            assert "checkpoint gone" in str(errors[fail])
            return
    pytest.fail("no rank had anything to load: the case tests nothing")


@pytest.mark.parametrize("call", range(5, 25, 3))
def test_a_second_loss_in_the_middle_leaves_the_old_weights_whole(call: int) -> None:
    results, _ = run_change(*CASES["scale up"], death=lossy.Death(4, call))
    assert isinstance(results[4], lossy.Died)
    for done in results[:4]:
        assert isinstance(done[2], TransportError) or len(done[1]) == L


def test_a_planner_that_cannot_plan_says_so_on_every_process() -> None:
    def body(transport):
        old = plan(loads(), 3, 27).phy2log
        with pytest.raises(PlanError, match="could not plan"):
            replan(
                transport, L, E, 2, 24, [0, 1], old_gpus=3, old=old, window=LoadWindow(L, E),
                max_swaps=-1,
            )  # fmt: skip
        return True

    assert lossy.run(2, body)[0] == [True, True]
