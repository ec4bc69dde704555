"""Exchange of routed tokens between the processes of an expert-parallel group.

These are collectives, not functions of tensors alone: every rank of the group calls them in the
same order. So they stand beside the registered operators, and not among them.
"""

from __future__ import annotations

from deepinfer_kernels.ep.deep_ep import DeepEP, DeepEPDispatched
from deepinfer_kernels.ep.dispatch import Dispatched, ep_combine, ep_dispatch
from deepinfer_kernels.ep.exchange import Alone, Exchange, GlooExchange

__all__ = [
    "Alone",
    "DeepEP",
    "DeepEPDispatched",
    "Dispatched",
    "Exchange",
    "GlooExchange",
    "ep_combine",
    "ep_dispatch",
]
