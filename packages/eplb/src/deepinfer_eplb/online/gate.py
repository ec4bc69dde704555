"""When a plan is worth the move."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_eplb.planning.planner import Plan


@dataclass(frozen=True, slots=True)
class Gate:
    """When a plan is worth its move: steps * t_moe_s * (old_B - predicted_B) > move time.

    t_moe_s:      seconds a step spends in MoE layers at B = 1.
    expert_bytes: bytes of one expert, side tensors included.
    bytes_per_s:  rate at which one rank receives.
    """

    t_moe_s: float = 0.02
    expert_bytes: float = 13.4e6
    bytes_per_s: float = 5e9

    def worth(self, made: Plan, steps_until_next: int) -> bool:
        """Whether the time saved until the next plan exceeds the time of the move."""
        if made.old_B is None:
            return True
        L, S = made.phy2log.shape
        move_s = made.moved * L * S / made.num_gpus * self.expert_bytes / self.bytes_per_s
        return steps_until_next * self.t_moe_s * (made.old_B - made.predicted_B) > move_s
