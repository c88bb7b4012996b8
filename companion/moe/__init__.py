"""Mixture of experts: which experts a token is sent to, how it gets there, what they do, and how even the
load is.

>>> import torch
>>> from companion.moe import route
>>> weights, ids = route(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), top_k=2, renormalize=True)
>>> ids.tolist(), [round(w, 5) for w in weights[0].tolist()]
([[0, 1]], [0.73106, 0.26894])
"""

from ..cost import RoutingSpec
from .dispatch import Dispatch, capacity_of, combine, dispatch, gather
from .experts import dense_experts, gated, grouped_experts, grouped_linear, split_interleaved
from .moe import MoE, Routing
from .route import Load, aux_loss, load, route, updated_bias

__all__ = [
    "Dispatch",
    "Load",
    "MoE",
    "Routing",
    "RoutingSpec",
    "aux_loss",
    "capacity_of",
    "combine",
    "dense_experts",
    "dispatch",
    "gated",
    "gather",
    "grouped_experts",
    "grouped_linear",
    "load",
    "route",
    "split_interleaved",
    "updated_bias",
]
