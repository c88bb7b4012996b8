"""From tokens to experts and back: a sort, a count, a running sum. Nothing is padded and nothing is lost.

    ids (T, k)      slot = token * k + choice, a token's k copies one after another
    order (S,)      slots sorted by expert, so that the rows of an expert are neighbours
    counts (E,)     rows per expert; their running sum says where each expert's rows begin
    inverse (T, k)  where each slot's row lies: the inverse permutation

The sort is stable: within an expert, rows keep the order of the tokens. So the result is the same on every
run, and a capacity, if there is one, drops the latest tokens.

Sources: Gale et al. 2022 (MegaBlocks, no dropping); Fedus et al. 2021, section 2.2 (capacity).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ..checks import positive, whole

NOWHERE = -1


@dataclass(frozen=True)
class Dispatch:
    """Where each of T x k slots goes.

    order    (S,) int64: the slot of each row, rows sorted by expert; S = T k unless some are not sent
    counts   (E,) int64: rows per expert
    inverse  (T, k) int64: the row of each slot, -1 for a slot that is not sent
    dropped  slots that were turned away by the capacity
    """

    order: Int64[Tensor, " S"]
    counts: Int64[Tensor, " E"]
    inverse: Int64[Tensor, "T k"]
    dropped: int = 0

    @cached_property
    def tokens(self) -> Int64[Tensor, " S"]:
        """(S,) the token that each row is a copy of."""
        return self.order // self.inverse.shape[1]

    @cached_property
    def offsets(self) -> Int64[Tensor, " E_plus_1"]:
        """(E + 1,) expert e owns rows offsets[e] to offsets[e + 1]."""
        return torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])

    @cached_property
    def sizes(self) -> list[int]:
        """`counts` as Python integers: what a loop over experts needs, fetched from the device once."""
        return self.counts.tolist()

    @property
    def sent(self) -> Bool[Tensor, "T k"]:
        """(T, k) True where a slot has a row."""
        return self.inverse >= 0


def dispatch(ids: Int64[Tensor, "T k"], experts: int, *, capacity: int | None = None) -> Dispatch:
    """Sort the slots of `ids` by expert.

    ids: (T, k) experts of each token, 0 to experts - 1, or -1: not sent at all (padding). T may be 0.
    capacity: the most rows that an expert takes; None takes all. Of more, the earliest tokens are kept and
        later ones dropped; a dropped slot adds nothing to its token's output, and the weights of the token's
        other slots stay as they are.

    Raises ValueError for ids out of range, experts below 1, or a negative capacity.
    """
    if ids.ndim != 2 or ids.dtype != torch.int64:
        raise ValueError(f"ids must be int64 of shape (T, k), got {ids.dtype} {tuple(ids.shape)}")
    whole("experts", experts)
    if capacity is not None:
        whole("capacity", capacity, 0)
    flat = ids.reshape(ids.numel())
    low = 0
    if flat.numel():
        low, high = (int(v) for v in torch.aminmax(flat))
        if low < NOWHERE or high >= experts:
            bad = low if low < NOWHERE else high
            raise ValueError(f"ids must be in 0..{experts - 1}, or -1 for not sent; got {bad}")
    if low == NOWHERE:
        flat = torch.where(flat == NOWHERE, experts, flat)  # one expert too many: sorted to the end, cut off
    by_expert, order = torch.sort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)[:experts]
    dropped = 0
    if low == NOWHERE:
        order = order[: int(counts.sum())]
    if capacity is not None and order.numel():
        begin = counts.cumsum(0) - counts
        place = torch.arange(order.numel(), device=ids.device) - begin[by_expert[: order.numel()]]
        kept = order[place < capacity]
        dropped, order, counts = order.numel() - kept.numel(), kept, counts.clamp(max=capacity)
    inverse = torch.full_like(flat, NOWHERE)
    inverse.scatter_(0, order, torch.arange(order.numel(), device=ids.device))
    return Dispatch(order, counts, inverse.view(ids.shape), dropped)


def capacity_of(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """Rows per expert under a capacity factor: ceil(factor * tokens * top_k / experts).

    A factor of 1 is an even share; Switch Transformers used 1 to 2 (section 2.2).
    """
    return math.ceil(positive("factor", factor) * tokens * top_k / experts)


def gather(x: Float[Tensor, "T D"], plan: Dispatch) -> Float[Tensor, "S D"]:
    """Rows (S, D): a copy of each token for each expert that it is sent to, in the order of the experts."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Gather.apply(x, plan)
    return x.index_select(0, plan.tokens)


def combine(
    rows: Float[Tensor, "S D"], weights: Float[Tensor, "T k"], plan: Dispatch
) -> Float[Tensor, "T D"]:
    """Outputs (T, D): each token's rows, weighted and added up in the order of its choices.

    Added in float32 at least, returned in the dtype of `rows`. A slot that was not sent is left out,
    whatever its weight, so a token that was sent nowhere has 0.
    """
    dtype = torch.promote_types(rows.dtype, weights.dtype)
    slots = _unsorted(rows.to(dtype), plan)  # (T, k, D)
    weights = weights.to(dtype)
    if rows.shape[0] < plan.inverse.numel():
        weights = weights.masked_fill(~plan.sent, 0.0)
    return torch.bmm(weights[:, None, :], slots)[:, 0].to(rows.dtype)


def _unsorted(rows: Tensor, plan: Dispatch) -> Tensor:
    """(S, D) in the order of experts -> (T, k, D) in that of tokens; 0 for a slot that was not sent."""
    (T, k), (S, D) = plan.inverse.shape, rows.shape
    if S == T * k:
        return rows.index_select(0, plan.inverse.view(T * k)).view(T, k, D)
    rows = torch.cat([rows, rows.new_zeros(1, D)])  # row -1 is the zero row
    return rows[plan.inverse]


class _Gather(torch.autograd.Function):
    """Its gradient adds a token's copies in the order of choices. Nothing is scattered: one order."""

    @staticmethod
    def forward(ctx, x, plan):
        ctx.plan = plan
        return x.index_select(0, plan.tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return _unsorted(grad, ctx.plan).sum(dim=1), None
