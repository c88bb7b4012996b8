"""The mixture of experts in a decoder layer: `companion.moe.MoE`, filled from a checkpoint's tensors."""

from collections.abc import Callable, Sequence

import torch

from ..cost import ModelSpec
from ..moe import MoE
from .experts import ExpertWeights
from .tensors import Tensors


def mixture(
    spec: ModelSpec,
    take: Tensors,
    experts: Callable[[Tensors, int, int, int], ExpertWeights],
    places: Sequence[str] = ("mlp.",),
    router: str = "gate.",
) -> MoE:
    """The routed and shared experts of one layer, whose tensors are `take`.

    experts: how the experts' matrices are read. places: prefixes below which a mixture may lie; the first
    that has a router counts. router: the router's prefix below that.

    The router's bias and correction are kept in float32 at least. Raises ValueError for a tensor that is
    missing or misshapen.
    """
    m, d = spec.moe, spec.d_model
    place = next((p for p in places if f"{p}{router}weight" in take), places[0])
    take = take.under(place)
    gate = take.under(router)
    w1, w2, b1, b2 = experts(take, m.experts, m.ffn, d)
    exact = torch.promote_types(w1.dtype, torch.float32)
    state = {"router": gate("weight", m.experts, d).clone(), "w1": w1, "w2": w2}
    if m.router_bias:
        state["router_bias"] = gate("bias", m.experts).to(exact).clone()
    if m.correction_bias:
        state["correction_bias"] = gate("e_score_correction_bias", m.experts).to(exact).clone()
    if b1 is not None:
        state |= {"b1": b1, "b2": b2}
    if m.shared:
        shared = take.under("shared_experts.")
        names = ("gate_proj.weight", "up_proj.weight")
        state["shared_w1"] = torch.cat([shared(n, m.shared_ffn, d) for n in names])
        state["shared_w2"] = shared("down_proj.weight", d, m.shared_ffn).clone()
    layer = MoE.from_spec(spec, dtype=w1.dtype, device="meta")  # no memory before the tensors are there
    layer.load_state_dict(state, assign=True)
    return layer.requires_grad_(False)
