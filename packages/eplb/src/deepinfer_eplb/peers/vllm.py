"""vLLM's EPLB with our placements: its policy class, replaced.

vLLM asks a policy class for a placement, from load totals and the placement in force. `install`
puts ours in the place of its "default" policy, in this process. vLLM calls `plugin` in every one of
its processes (entry point `vllm.general_plugins`), which installs it where the environment says
DEEPINFER_EPLB_VLLM=1:

    DEEPINFER_EPLB_VLLM=1 vllm serve ... --enable-eplb

Written against vLLM 0.32.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Final

import numpy as np

from deepinfer_eplb.peers.eplb import rebalance_from

SWITCH: Final = "DEEPINFER_EPLB_VLLM"


def rebalance(
    weight: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    old_global_expert_indices: Any | None = None,
) -> Any:
    """torch int64 [L, num_replicas]; the arguments of vLLM's `AbstractEplbPolicy`."""
    import torch  # pyright: ignore[reportMissingImports]

    made = rebalance_from(
        weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices
    )
    return torch.from_numpy(np.ascontiguousarray(made))


@cache
def policy() -> type:
    """Our policy as a subclass of vLLM's abstract one; ImportError without vLLM."""
    try:
        from vllm.distributed.eplb.policy import (  # pyright: ignore[reportMissingImports]
            AbstractEplbPolicy,
        )
    except ImportError as e:
        raise ImportError("this policy needs vLLM 0.32 or newer with EPLB: install vllm") from e
    return type(
        "DeepinferEplbPolicy",
        (AbstractEplbPolicy,),
        {
            "__doc__": "From the placement in force, moving little; never worse on the totals.",
            "rebalance_experts": staticmethod(rebalance),
        },
    )


def install() -> type:
    """Make vLLM's "default" EPLB policy ours in this process; returns the class it had."""
    ours = policy()
    from vllm.distributed.eplb import policy as theirs  # pyright: ignore[reportMissingImports]

    before = theirs.EPLB_POLICIES["default"]
    theirs.EPLB_POLICIES["default"] = ours
    return before


def plugin() -> None:
    """Entry point: install where DEEPINFER_EPLB_VLLM=1, else leave vLLM as it is."""
    if os.environ.get(SWITCH) == "1":
        install()
