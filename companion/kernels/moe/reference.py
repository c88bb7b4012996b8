"""What `grouped_gemm` and `fused_moe` compute, in torch from the definition, an expert a turn."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .plan import GemmTile


def grouped_gemm_reference(
    x: Float[Tensor, "S K"],
    w: Float[Tensor, "E N K"],
    offsets: Int[Tensor, " E_plus_1"],
    *,
    bias: Float[Tensor, "E N"] | None = None,
    form: str = "padded",
    tile: GemmTile | None = None,
) -> Float[Tensor, "S N"]:
    """The same in torch, an expert a turn, in float32 at least. `form` and `tile` change nothing."""
    exact = torch.promote_types(x.dtype, torch.float32)
    out = x.new_empty(x.shape[0], w.shape[1])
    for e, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist())):
        rows = x[begin:end].to(exact) @ w[e].to(exact).T
        out[begin:end] = rows if bias is None else rows + bias[e].to(exact)
    return out


def fused_moe_reference(
    x: Float[Tensor, "T K"],
    w1: Float[Tensor, "E two_n K"],
    w2: Float[Tensor, "E K n"],
    topk_weights: Float[Tensor, "T k"],
    topk_ids: Int[Tensor, "T k"],
    *,
    b1: Float[Tensor, "E two_n"] | None = None,
    b2: Float[Tensor, "E K"] | None = None,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    form: str = "padded",
    tile: GemmTile | None = None,
    check_ids: bool = True,
) -> Float[Tensor, "T K"]:
    """The same in torch from the definition, an expert a turn. The last three change nothing."""
    b1 = w1.new_zeros(w1.shape[:2]) if b1 is None else b1
    b2 = w2.new_zeros(w2.shape[:2]) if b2 is None else b2
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for e in range(w1.shape[0]):
        t, j = (topk_ids == e).nonzero(as_tuple=True)
        gate, up = (x[t].to(out) @ w1[e].to(out).T + b1[e].to(out)).chunk(2, dim=-1)
        if activation == "silu":
            h = F.silu(gate) * up
        else:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = gate * torch.sigmoid(alpha * gate) * (up + 1)
        rows = h.to(x.dtype).to(out) @ w2[e].to(out).T + b2[e].to(out)
        out.index_add_(0, t, topk_weights[t, j, None].to(out) * rows)
    return out.to(x.dtype)
