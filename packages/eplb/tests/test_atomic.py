"""Weights and maps switch together or not at all, wherever a rank dies or fails."""

from __future__ import annotations

from itertools import combinations

import lossy
import numpy as np
import pytest

from deepinfer_eplb import (
    Balancer,
    CommitError,
    EplbError,
    Gate,
    LoadWindow,
    Plan,
    TransportError,
    maps_of,
)

RANKS, LAYERS, EXPERTS, SLOTS = 3, 2, 5, 9
C = SLOTS // RANKS
OLD = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3], [4, 3, 2, 1, 0, 4, 3, 2, 1]], dtype=np.int32)
NEW = np.array([[3, 1, 4, 0, 2, 1, 1, 0, 0], [0, 3, 4, 4, 0, 1, 3, 2, 2]], dtype=np.int32)
STEPS = 5


def fixed_plan(*_, **__) -> Plan:
    log2phy, logcnt = maps_of(NEW, EXPERTS)
    return Plan(NEW, log2phy, logcnt, RANKS, 1.0, 2.0, 0.5, 0, 0, 0.0)


class Rank:
    """A balancer with weights that carry their expert's id, and an engine that listens to it."""

    def __init__(self, transport, on_commit=None, wrap=lambda w: w) -> None:
        self.rank = transport.rank
        mine = OLD[:, self.rank * C : (self.rank + 1) * C]
        self.weights = [
            [wrap(np.repeat(row[:, None], 3, axis=1).astype(np.float32)), wrap(row * 7)]
            for row in mine
        ]
        self.told = {layer: OLD[layer].copy() for layer in range(LAYERS)}
        self.user = on_commit
        self.balancer = Balancer(
            LAYERS, EXPERTS, RANKS, SLOTS, transport=transport, weights=self.weights, initial=OLD,
            window=LoadWindow(LAYERS, EXPERTS, blocks=2, steps_per_block=1), gate=Gate(1.0, 1.0),
            check_every=1, rearrange_every=1, record_every=1, plan_steps=1, planner=fixed_plan,
            background=lambda run: run(), on_commit=self.on_commit,
        )  # fmt: skip
        self.errors: list[BaseException] = []

    def on_commit(self, layer: int, row: np.ndarray) -> None:
        if self.user is not None:
            self.user(self, layer, row)
        self.told[layer] = row.copy()

    def serve(self, steps: int = STEPS) -> Rank:
        for _ in range(steps):
            try:
                self.balancer.step(np.ones((LAYERS, C), dtype=np.int64))
            except EplbError as e:
                self.errors.append(e)
        return self

    @property
    def error(self) -> BaseException | None:
        return self.errors[-1] if self.errors else None

    def check(self) -> None:
        """Weights, maps and the engine's copy agree, and each layer is the old or the new one."""
        b = self.balancer
        log2phy, logcnt = maps_of(b.phy2log, EXPERTS)
        assert np.array_equal(b.logcnt, logcnt)
        assert np.array_equal(b.log2phy[:, :, : log2phy.shape[2]], log2phy)
        assert (b.log2phy[:, :, log2phy.shape[2] :] == -1).all()
        for layer in range(LAYERS):
            held = b.local_experts()[layer]
            assert np.array_equal(self.weights[layer][0], np.repeat(held[:, None], 3, axis=1))
            assert np.array_equal(self.weights[layer][1], held * 7)
            assert np.array_equal(self.told[layer], b.phy2log[layer])
            assert any(np.array_equal(b.phy2log[layer], p[layer]) for p in (OLD, NEW))


def calm() -> list[str]:
    """Kinds of the calls of an undisturbed run."""
    results, hub = lossy.run(RANKS, lambda t: Rank(t).serve())
    for rank in results:
        assert rank.error is None
        rank.check()
        assert np.array_equal(rank.balancer.phy2log, NEW)
    return hub.kinds


def deaths() -> list[lossy.Death]:
    out = []
    for call, kind in enumerate(calm()):
        for victim in range(RANKS):
            others = [r for r in range(RANKS) if r != victim]
            out.append(lossy.Death(victim, call))
            if kind == "p2p":
                out += [lossy.Death(victim, call, others, messages) for messages in (1, 99)]
            else:
                out += [
                    lossy.Death(victim, call, told)
                    for n in range(RANKS)
                    for told in combinations(others, n)
                ]
    return out


def test_a_death_at_any_call_leaves_every_survivor_whole_and_the_next_group_of_one_mind() -> None:
    """Every call of two layers' commits, every victim, every set of ranks whose call still ends."""
    cases = deaths()
    rolled = 0
    for death in cases:
        results, _ = lossy.run(RANKS, lambda t: Rank(t).serve(), death)
        alive = [rank for r, rank in enumerate(results) if r != death.victim]
        assert isinstance(results[death.victim], lossy.Died)
        for rank in alive:
            assert isinstance(rank, Rank), (death, rank)
            assert rank.error is None or isinstance(rank.error, TransportError), death
            assert rank.balancer.failure is rank.error
            assert len(rank.errors) <= 1
            rank.check()
        whole = death.told is None or len(death.told) in (0, RANKS - 1)
        if whole:
            # a call that ends for all or for none splits nobody
            assert len({rank.balancer.phy2log.tobytes() for rank in alive}) == 1, death
        assert max(r.balancer.generation for r in alive) - min(
            r.balancer.generation for r in alive
        ) <= (not whole), death
        settled, _ = lossy.run(len(alive), lambda t, a=alive: a[t.rank].balancer.settle(t))
        assert len(set(settled)) == 1
        rolled += settled[0]
        for rank in alive:
            rank.check()
        assert len({rank.balancer.phy2log.tobytes() for rank in alive}) == 1, death
        assert len({rank.balancer.generation for rank in alive}) == 1, death
    assert len(cases) > 200
    assert rolled > 0  # some deaths did split the survivors, or `settle` was not tried


def test_a_peer_that_comes_back_lets_balancing_go_on() -> None:
    """All ranks live (a stopped process goes on): the same group size settles and moves again."""
    death = lossy.Death(victim=2, call=calm().index("p2p"))

    def body(transport):
        rank = Rank(transport)
        try:
            return rank.serve()
        except lossy.Died:
            return rank

    ranks, _ = lossy.run(RANKS, body, death)

    def again(transport):
        ranks[transport.rank].balancer.settle(transport)
        ranks[transport.rank].errors.clear()
        return ranks[transport.rank].serve(12)

    lossy.run(RANKS, again)
    for rank in ranks:
        rank.check()
        assert rank.error is None
        assert np.array_equal(rank.balancer.phy2log, NEW)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("error", [ValueError("callback failed"), MemoryError()], ids=repr)
def test_a_callback_that_fails_on_some_ranks_takes_all_back(victims, layer, error) -> None:
    raised: list[int] = []

    def fail(rank, at, row) -> None:
        if rank.rank in victims and at == layer and np.array_equal(row, NEW[at]):
            raised.append(rank.rank)
            if raised.count(rank.rank) == 1:
                raise error

    results, _ = lossy.run(RANKS, lambda t: Rank(t, fail).serve(2 + layer))
    for rank in results:
        rank.check()
        assert isinstance(rank.error, CommitError)
        assert f"{len(victims)} of 3 ranks" in str(rank.error)
        assert rank.balancer.failure is None
        assert np.array_equal(rank.balancer.phy2log[layer], OLD[layer])
    later, _ = lossy.run(RANKS, lambda t: Rank(t, fail).serve(8))
    for rank in later:
        assert np.array_equal(rank.balancer.phy2log, NEW)  # the next plan carries it out


class Faulty(np.ndarray):
    """Raises at the n-th write of a row."""

    writes: list[int]

    def __array_finalize__(self, of) -> None:
        self.writes = getattr(of, "writes", [])

    def __setitem__(self, key, value) -> None:
        if self.writes:
            self.writes[0] -= 1
            if self.writes[0] == 0:
                raise MemoryError("at this write")
        super().__setitem__(key, value)


def faulty(weight: np.ndarray, writes: list[int]) -> np.ndarray:
    out = weight.view(Faulty)
    out.writes = writes
    return out


def test_a_fault_at_any_write_of_any_rank_changes_nothing_anywhere() -> None:
    """MemoryError at the n-th row written to live weights, for every n until none is left."""
    for victim in range(RANKS):
        for nth in range(1, 99):
            left = [nth]

            def body(transport, left=left, victim=victim):
                mine = left if transport.rank == victim else []
                return Rank(transport, wrap=lambda w: faulty(w, mine)).serve(3)

            results, _ = lossy.run(RANKS, body)
            for rank in results:
                rank.check()
            if left[0] > 0:
                break
            assert all(isinstance(rank.error, CommitError) for rank in results), (victim, nth)
        assert nth > 4  # faults did happen


def test_an_interrupt_between_switch_and_vote_goes_back_before_it_leaves() -> None:
    def interrupted(rank, _, row) -> None:
        if rank.rank == 1 and np.array_equal(row, NEW[0]):
            raise KeyboardInterrupt

    kept: list[Rank] = []

    def body(transport):
        rank = Rank(transport, interrupted)
        kept.append(rank)
        return rank.serve()

    results, _ = lossy.run(RANKS, body)
    assert isinstance(results[1], KeyboardInterrupt)
    for rank in kept:
        rank.told[0] = rank.balancer.phy2log[0]  # the callback that was cut off did not note it
        rank.check()
        assert np.array_equal(rank.balancer.phy2log, OLD)
    assert all(isinstance(results[r].error, TransportError) for r in (0, 2))


def test_counts_and_steps_go_on_quietly_after_the_error() -> None:
    results, _ = lossy.run(RANKS, lambda t: Rank(t).serve(30), lossy.Death(0, 6))
    for rank in results[1:]:
        assert isinstance(rank.error, TransportError)
        before = rank.balancer.phy2log.copy()
        assert rank.balancer.step(np.ones((LAYERS, C), dtype=np.int64)).committed == ()
        assert np.array_equal(rank.balancer.phy2log, before)


def test_ranks_too_far_apart_are_refused() -> None:
    """Two commits apart there is no second copy: the error says so on every rank."""
    results, _ = lossy.run(RANKS, lambda t: Rank(t).serve())
    results[1].balancer.generation -= 2

    def settle(transport):
        with pytest.raises(EplbError, match="1 ranks are behind"):
            results[transport.rank].balancer.settle(transport)
        return True

    assert lossy.run(RANKS, settle)[0] == [True] * RANKS
