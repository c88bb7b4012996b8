"""The mixture of experts with matrices in int8: each expert that has rows, one after another."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..cost import ModelSpec
from ..moe import MoE, Routing, capacity_of, combine, dispatch, gated, gather
from .int8 import Int8Matrix, int8_product

MATRICES = ("w1", "w2", "shared_w1", "shared_w2")


class Int8MoE(MoE):
    """`companion.moe.MoE` whose w1, w2, shared_w1 and shared_w2 are `Int8Matrix`; the router keeps its dtype,
    since a rounded score may choose another expert."""

    @classmethod
    def of(cls, moe: MoE, spec: ModelSpec) -> "Int8MoE":
        """The same mixture, sharing what stays as it is. Raises ValueError for weights that hold NaN."""
        layer = cls.from_spec(
            spec, capacity_factor=moe.capacity_factor, dtype=moe.w1.dtype, device="meta"
        )  # no memory of its own
        for name in ("router", "router_bias", "b1", "b2", "shared_gate", "correction_bias"):
            setattr(layer, name, getattr(moe, name))
        for name in MATRICES:
            weight = getattr(moe, name)
            if weight is not None:
                delattr(layer, name)  # torch refuses to put a module where a parameter was
                setattr(layer, name, Int8Matrix(weight))
        return layer.requires_grad_(False).train(moe.training)

    def routed(self, x: Float[Tensor, "T K"], routing: Routing) -> Float[Tensor, "T K"]:
        capacity = None
        if self.capacity_factor is not None:
            capacity = capacity_of(x.shape[0], self.experts, self.top_k, self.capacity_factor)
        plan = dispatch(routing.ids, self.experts, capacity=capacity)
        h = _each(gather(x, plan), self.w1, plan.sizes, self.b1)
        h = gated(h, limit=self.swiglu_limit, alpha=self.swiglu_alpha)
        return combine(_each(h, self.w2, plan.sizes, self.b2), routing.weights, plan)

    def shared(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T K"]:
        out = self.shared_w2(gated(self.shared_w1(x)))
        return out if self.shared_gate is None else out * torch.sigmoid(x @ self.shared_gate.t())


def _each(x: Tensor, weight: Int8Matrix, sizes: Sequence[int], bias: Tensor | None) -> Tensor:
    """Rows (S, out): the first sizes[0] rows of x through expert 0, the next through expert 1."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    begin = 0
    for e, rows in enumerate(sizes):
        if rows:
            own = None if bias is None else bias[e]
            end = begin + rows
            out[begin:end] = int8_product(x[begin:end], weight.codes[e], weight.scale[e], own)
            begin = end
    return out
