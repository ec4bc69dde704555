"""Expert-parallel load balancing on per-step loads, with little movement, while serving."""

from deepinfer_eplb.dispatch import dispatch, waterfill
from deepinfer_eplb.errors import (
    CommitError,
    EplbError,
    LoadError,
    PeerLostError,
    PlanError,
    ShapeError,
    TopologyError,
    TransportError,
)
from deepinfer_eplb.evaluation import Evaluation, evaluate
from deepinfer_eplb.online.balancer import Balancer, StepEvent
from deepinfer_eplb.online.elastic import replan
from deepinfer_eplb.online.gate import Gate
from deepinfer_eplb.online.window import LoadWindow
from deepinfer_eplb.peers.eplb import rebalance_experts
from deepinfer_eplb.placement import initial_placement, maps_of, slots_for
from deepinfer_eplb.planning.planner import Plan, plan
from deepinfer_eplb.rearrange.layer import rearrange_layer
from deepinfer_eplb.rearrange.movement import MovementPlan, ResizePlan, movement, resize, simulate
from deepinfer_eplb.rearrange.resize import resize_layer
from deepinfer_eplb.rearrange.transport import Alone, GlooTransport, Transport

__version__ = "0.2.0"

__all__ = [
    "Alone",
    "Balancer",
    "CommitError",
    "EplbError",
    "Evaluation",
    "Gate",
    "GlooTransport",
    "LoadError",
    "LoadWindow",
    "MovementPlan",
    "PeerLostError",
    "Plan",
    "PlanError",
    "ResizePlan",
    "ShapeError",
    "StepEvent",
    "TopologyError",
    "Transport",
    "TransportError",
    "dispatch",
    "evaluate",
    "initial_placement",
    "maps_of",
    "movement",
    "plan",
    "rearrange_layer",
    "rebalance_experts",
    "replan",
    "resize",
    "resize_layer",
    "simulate",
    "slots_for",
    "waterfill",
]
