"""What one `plan` is about: the match and the costs as the planner wants them."""

from __future__ import annotations

from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.layout import LayoutSpec
from deepinfer_kvtier.match import Match
from deepinfer_kvtier.plan import BlockMark, Cost, Plan, ReplayMode, StoredState, choose_cut
from deepinfer_kvtier.quality import APPROXIMATE_BIT, GENERATION_BITS
from deepinfer_kvtier.tierset import TierSet


def plan_match(
    tiers: TierSet, layout: LayoutSpec, match: Match, *, cost: Cost | None, mode: ReplayMode
) -> Plan:
    """Everything behind `Namespace.plan`. raises: ConfigError."""
    if mode not in ("bounded", "exact", "none"):
        raise ConfigError(f"mode is bounded, exact or none, got {mode!r}")
    state_at: dict[int, StoredState] = {}
    if match.state is not None:
        hit = match.state
        state_at[hit.n_blocks] = StoredState(
            hit.tier, hit.bytes, hit.approximate, hit.replay_generation
        )
    plan = choose_cut(
        prompt_tokens=match.prompt_tokens,
        block_tokens=layout.block_tokens,
        block_bytes=layout.payload_bytes("block"),
        tiers=match.tiers(),
        state_at=state_at,
        needs_state=layout.payload_bytes("state") > 0,
        marks=[
            BlockMark(bool(mark & APPROXIMATE_BIT), mark & GENERATION_BITS)
            for mark in match.marks().tolist()
        ],
        mode=mode,
        cost=cost or tiers.costs.current(),
    )
    tiers.counts[f"plans_{plan.state}"] += 1
    return plan
