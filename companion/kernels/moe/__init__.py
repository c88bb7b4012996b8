"""A mixture of experts in three launches: up, down, and the sum of each token's rows.

    sort the slots by expert               slot = token * k + choice
    h[row]  = act(gate) * up               x gathered by row, w1; gate and up meet in registers
    y[slot] = weight[slot] * (h[row] w2')  written where the slot belongs, float32
    out[t]  = y[t k] + ... + y[t k + k-1]  in the order of choices

The sum has a launch of its own because an expert's rows are finished in any order: adding them atomically as
they come would give another rounding each run. It costs 8 bytes per row and column, next to the weights of a
decode step nothing (`companion.kernels.moe.plan.moe_kernel_bytes`).

Source: Shazeer et al. 2017, equation 1; gpt-oss's model code (the clamped gate).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..mode import capability, on
from .gemm import COMBINE, buffer, check_matrices, check_shape, launch, plan_rows
from .plan import GemmTile, gemm_tile

ACTIVATIONS = ("silu", "gpt_oss")


def fused_moe(
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
    """`sum_j topk_weights[t, j] * expert[topk_ids[t, j]](x[t])` for every token t; (T, K) in x's dtype.

    x: (T, K); T may be 0. w1: (E, 2N, K), gate rows before up rows. w2: (E, K, N). b1: (E, 2N). b2: (E, K).
    topk_weights: (T, k) floats, used as float32. topk_ids: (T, k) int32 or int64; -1 is a slot that is not
        sent, whatever its weight, and a token without any gets 0. Experts without a token are never read.
    activation: "silu" is silu(gate) * up; "gpt_oss" is gate * sigmoid(alpha * gate) * (up + 1) with gate at
        most `limit` and up within +-limit.
    form, tile: see `grouped_gemm`; block_n of the tile holds for the second product, the first has half.
    check_ids: look for ids out of range, which on a GPU waits for it. Without it such slots are not sent.

    The hidden row is rounded to x's dtype, the sum over choices is in float32. Same bits on every run; with a
    given `tile` a token's result does not depend on its batch. NaN in a token reaches that token alone. There
    is no gradient.

    Raises ValueError for shapes, strides, dtypes and ids that do not fit, with nothing launched.
    """
    if w1.shape[1] % 2 or activation not in ACTIVATIONS:
        accepted = " or ".join(map(repr, ACTIVATIONS))
        raise ValueError(
            f"w1 must have an even number of rows and activation be {accepted}; "
            f"got {tuple(w1.shape)} and {activation!r}"
        )
    interpreting = check_matrices(x, {"w1": w1, "w2": w2}, {"b1": b1, "b2": b2}, topk_weights, topk_ids)
    (T, K), (E, two_n, _), k = x.shape, w1.shape, topk_ids.shape[1]
    for name, tensor, shape in (
        ("w1", w1, (E, two_n, K)),
        ("w2", w2, (E, K, two_n // 2)),
        ("b1", b1, (E, two_n)),
        ("b2", b2, (E, K)),
        ("topk_ids", topk_ids, (T, k)),
        ("topk_weights", topk_weights, (T, k)),
    ):
        check_shape(tensor, name, shape)
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids must be int32 or int64, got {topk_ids.dtype}")
    if T * k == 0:
        return x.new_zeros(T, K)
    sent = (topk_ids >= 0) & (topk_ids < E)
    if check_ids and not bool((sent | (topk_ids == -1)).all()):
        low, high = topk_ids.aminmax()
        raise ValueError(f"topk_ids must be in 0..{E - 1}, or -1 for not sent; got {int(low)} to {int(high)}")

    S = T * k
    by_expert, order = torch.where(sent, topk_ids, E).view(S).sort(stable=True)  # what is not sent comes last
    offsets = torch.searchsorted(by_expert, torch.arange(E + 1, device=x.device), out_int32=True)
    order = order.to(torch.int32)
    down = tile or gemm_tile(S, E, element_bytes=x.element_size(), capability=capability(x))
    up = down.halved()  # gate and up side by side
    plan = plan_rows(offsets, S, down.block_m, form)

    h = buffer(x, S, two_n // 2, interpreting)
    clamp = (limit, alpha) if activation == "gpt_oss" else None
    launch(x, w1, h, plan, up, bias=b1, order=order, gather=k, gated=True, clamp=clamp)
    y = x.new_empty(S, K, dtype=torch.float32)
    scale = topk_weights.to(torch.float32).contiguous()
    launch(h.to(x.dtype), w2, y, plan, down, bias=b2, order=order, scatter=scale)
    out = buffer(x, T, K, interpreting)
    _combine(y, sent, out)
    return out.to(x.dtype)


def _combine(y: Tensor, sent: Tensor, out: Tensor) -> None:
    """Add up each token's rows of y (T k, K) that were sent (T, k), into out (T, K)."""
    from .kernel import combine_kernel

    (T, K), k = out.shape, sent.shape[1]
    blocks = COMBINE if y.device.type != "cpu" else COMBINE | {"BLOCK_T": 64}
    grid = (-(-T // blocks["BLOCK_T"]), -(-K // blocks["BLOCK_D"]))
    marks = sent.to(torch.int8)
    with on(y):
        combine_kernel[grid](y, marks, out, T, K, y.stride(0), out.stride(0), TOP_K=k, **blocks)
