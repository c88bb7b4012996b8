"""The experts: E small feed-forwards, each for the rows that were sent to it.

`grouped_experts` is what runs; `dense_experts` is the loop from the definition that it is tested against.
Both take w1 (E, 2N, K), gate rows before up rows, and w2 (E, K, N), for a model of width K and experts of
width N.

`grouped_linear` is the one place that multiplies: a kernel for another device takes its place, with the same
arguments.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from ..attend import backend
from ..checks import shape
from .dispatch import combine, dispatch, gather

FEW = 8  # rows of an expert up to which its weights stand on the left of the product
_BLAS = (torch.float32, torch.float64)


def gated(
    h: Float[Tensor, "*rows two_n"], *, limit: float | None = None, alpha: float = 1.702
) -> Float[Tensor, "*rows n"]:
    """The gated activation of h (..., 2N), gate in the first half, up in the second; (..., N).

    limit None: silu(gate) * up (Shazeer 2020). Else gpt-oss's, with gate at most `limit` and up within
    +-limit: gate * sigmoid(alpha * gate) * (up + 1).
    """
    gate, up = h.chunk(2, dim=-1)
    if limit is None:
        out = F.silu(gate)
        return out * up if h.requires_grad else out.mul_(up)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def split_interleaved(w: Tensor, dim: int) -> Tensor:
    """Gate and up taken apart: entries 0, 2, 4.. of `dim` (gate) before entries 1, 3, 5.. (up).

    gpt-oss interleaves them and stores (E, K, 2N): w1 = split_interleaved(w, -1).transpose(1, 2), and its
    bias (E, 2N) likewise without the transposition.
    """
    if w.shape[dim] % 2:
        raise ValueError(f"w must have an even size along dim {dim}, got {tuple(w.shape)}")
    halves = w.unflatten(dim, (-1, 2))
    return torch.cat(halves.unbind(dim if dim < 0 else dim + 1), dim=dim)


def grouped_experts(
    x: Float[Tensor, "T K"],
    w1: Float[Tensor, "E two_n K"],
    w2: Float[Tensor, "E K n"],
    ids: Int64[Tensor, "T k"],
    weights: Float[Tensor, "T k"],
    *,
    b1: Float[Tensor, "E two_n"] | None = None,
    b2: Float[Tensor, "E K"] | None = None,
    limit: float | None = None,
    alpha: float = 1.702,
    capacity: int | None = None,
) -> Float[Tensor, "T K"]:
    """All experts as one grouped computation: `sum_j weights[t, j] * expert[ids[t, j]](x[t])` for each t.

    x: (T, K); T may be 0. w1: (E, 2N, K); w2: (E, K, N), in x's dtype. ids: (T, k), -1 for a slot that is
        not sent.
    weights: (T, k). b1, b2: (E, 2N) and (E, K) biases. limit, alpha: see `gated`. capacity: see `dispatch`.

    Every row is computed by itself: NaN in one token reaches no other. Same result on every run with the
    same number of threads; the last bits depend on that number and on how many rows an expert has.

    Raises ValueError for shapes or dtypes that do not fit and for ids out of range.

    Sources: Shazeer et al. 2017, equation 1; Gale et al. 2022 (grouped, without padding or dropping).
    """
    _check(x, w1, w2, ids, weights, b1, b2)
    options = dict(b1=b1, b2=b2, limit=limit, alpha=alpha, capacity=capacity)
    return backend(x).experts(experts_by_torch, x, w1, w2, ids, weights, **options)


def experts_by_torch(x, w1, w2, ids, weights, *, b1, b2, limit, alpha, capacity) -> Tensor:
    """The same by torch, unchecked."""
    plan = dispatch(ids, w1.shape[0], capacity=capacity)
    h = gated(grouped_linear(gather(x, plan), w1, plan.sizes, b1), limit=limit, alpha=alpha)
    return combine(grouped_linear(h, w2, plan.sizes, b2), weights, plan)


def dense_experts(
    x: Float[Tensor, "T K"],
    w1: Float[Tensor, "E two_n K"],
    w2: Float[Tensor, "E K n"],
    ids: Int64[Tensor, "T k"],
    weights: Float[Tensor, "T k"],
    *,
    b1: Float[Tensor, "E two_n"] | None = None,
    b2: Float[Tensor, "E K"] | None = None,
    limit: float | None = None,
    alpha: float = 1.702,
) -> Float[Tensor, "T K"]:
    """The same from the definition: for every expert, find its tokens, run it, add up. The oracle."""
    _check(x, w1, w2, ids, weights, b1, b2)
    out = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype))
    for e in range(w1.shape[0]):
        token, choice = (ids == e).nonzero(as_tuple=True)
        h = F.linear(x[token], w1[e], None if b1 is None else b1[e])
        y = F.linear(gated(h, limit=limit, alpha=alpha), w2[e], None if b2 is None else b2[e])
        out = out.index_add(0, token, (y * weights[token, choice, None]).to(out.dtype))
    return out.to(x.dtype)


def grouped_linear(
    x: Float[Tensor, "S K"],
    weight: Float[Tensor, "E O K"],
    sizes: Sequence[int],
    bias: Float[Tensor, "E O"] | None = None,
) -> Float[Tensor, "S O"]:
    """Rows (S, O): the first sizes[0] rows of x through weight[0], the next sizes[1] through weight[1], and
    so on.

    x: (S, K), S = sum(sizes). weight: (E, O, K). bias: (E, O). An expert without rows costs nothing, and its
    gradient is 0.
    """
    if len(sizes) != weight.shape[0] or sum(sizes) != x.shape[0]:
        raise ValueError(
            f"sizes must be {weight.shape[0]} counts that add up to {x.shape[0]} rows; "
            f"got {len(sizes)} that add up to {sum(sizes)}"
        )
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        out = _GroupedLinear.apply(x, weight, sizes)
    else:
        out = _products(x, weight, sizes)
    if bias is None:
        return out
    rows = torch.tensor(sizes, device=bias.device)
    return out + bias.repeat_interleave(rows, dim=0, output_size=x.shape[0])


class _GroupedLinear(torch.autograd.Function):
    """One autograd node for all experts, forward and backward a loop over those that have rows."""

    @staticmethod
    def forward(ctx, x, weight, sizes):
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        return _products(x, weight, sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_w = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for e, begin, end in _spans(ctx.sizes):
            if grad_x is not None:
                torch.mm(grad[begin:end], weight[e], out=grad_x[begin:end])
            if grad_w is not None:
                torch.mm(grad[begin:end].t(), x[begin:end], out=grad_w[e])
        return grad_x, grad_w, None


def _products(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Rows (S, O) of x (S, K) under weight (E, O, K), expert by expert.

    A BLAS library that is given few rows wakes one thread and reads the weights badly. So on a CPU the
    outputs are cut into as many pieces as there are threads and handed over as one batch; and up to `FEW`
    rows the weights stand on the left, W x', as long rows that are read in order.
    """
    (S, K), (E, O) = x.shape, weight.shape[:2]
    out = x.new_empty(S, O)
    if x.device.type != "cpu" or x.dtype not in _BLAS or not weight.is_contiguous():
        for e, begin, end in _spans(sizes):
            torch.mm(x[begin:end], weight[e].t(), out=out[begin:end])
        return out
    n = _pieces(O)
    cut = weight.view(E, n, O // n, K)
    tall, wide = x.t().expand(n, K, S), x.expand(n, S, K)
    to = out.view(S, n, O // n).transpose(0, 1)  # (n, S, O / n)
    for e, begin, end in _spans(sizes):
        rows = end - begin
        if n == 1 and (rows == 1 or rows > FEW):
            torch.mm(x[begin:end], weight[e].t(), out=out[begin:end])
        elif rows <= FEW:
            to[:, begin:end] = torch.bmm(cut[e], tall[:, :, begin:end]).transpose(1, 2)
        else:
            to[:, begin:end] = torch.bmm(wide[:, begin:end], cut[e].transpose(1, 2))
    return out


def _pieces(n: int) -> int:
    """The largest number of equal pieces of n, at most one per thread."""
    return next(p for p in range(torch.get_num_threads(), 0, -1) if n % p == 0)


def _spans(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, one past its last) of every expert that has rows."""
    spans, begin = [], 0
    for e, size in enumerate(sizes):
        if size:
            spans.append((e, begin, begin + size))
            begin += size
    return spans


def _check(x, w1, w2, ids, weights, b1, b2) -> None:
    if w1.ndim != 3 or w1.shape[1] % 2 or x.ndim != 2 or w1.shape[2] != x.shape[1]:
        raise ValueError(f"w1 must be (E, 2N, K) for x (T, K); got {tuple(w1.shape)} and {tuple(x.shape)}")
    E, two_n, K = w1.shape
    needed = {"w2": (w2, (E, K, two_n // 2)), "b1": (b1, (E, two_n)), "b2": (b2, (E, K))}
    needed["weights"] = (weights, tuple(ids.shape))
    for name, (tensor, expected) in needed.items():
        if tensor is not None:
            shape(name, tensor, *expected)
    if not x.dtype == w1.dtype == w2.dtype:
        raise ValueError(f"x, w1 and w2 must have one dtype, got {x.dtype}, {w1.dtype}, {w2.dtype}")
    if ids.ndim != 2 or ids.shape[0] != x.shape[0]:
        raise ValueError(f"ids must be (T, k) for x {tuple(x.shape)}, got {tuple(ids.shape)}")
