"""Expert parallelism: the experts stay where they are, and the tokens travel.

Each rank owns some of the experts and has some of the tokens. Per layer with experts:

    route       every rank its own tokens, over all experts: routers are whole everywhere
    dispatch    rows sorted by expert, so those for one rank are neighbours; counts first, then rows
    compute     each rank its experts, on rows from all ranks
    combine     rows back the way they came, then weighted and added where the token lives

A token sent to k experts travels k times, each time as a row of d_model numbers, there and back; its weights
stay at home. Ranks with no tokens, ranks that get none and experts without rows take part all the same.
Sources: Lepikhin et al. 2020 (GShard), section 3; the DeepSeek-V3 report, section 3.2.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ..model import Decoder
from ..moe import MoE, Routing, combine, dispatch, gather, grouped_experts
from .collectives import Group, Number
from .slices import Slices


def exchanged_experts(
    x: Float[Tensor, "T K"],
    w1: Float[Tensor, "own two_n K"],
    w2: Float[Tensor, "own K n"],
    ids: Int64[Tensor, "T k"],
    weights: Float[Tensor, "T k"],
    *,
    group: Group,
    b1: Float[Tensor, "own two_n"] | None = None,
    b2: Float[Tensor, "own K"] | None = None,
    limit: Number | None = None,
    alpha: Number = 1.702,
) -> Float[Tensor, "T K"]:
    """`companion.moe.grouped_experts`, with the experts of all ranks; all of the group call it together.

    x: (T, K), this rank's tokens. T may be 0, and differ from rank to rank.
    ids, weights: (T, k), their choices among the experts of all ranks.
    w1, w2, b1, b2: this rank's experts, equally many on each; rank r owns those from r * own on.

    The other arguments are those of `grouped_experts`. No gradient.

    Raises ValueError on the rank whose arguments do not fit; the others then find that they have lost it.
    """
    own, n = w1.shape[0], group.size
    plan = dispatch(ids, own * n)
    rows = gather(x, plan)  # (S, K), sorted by expert
    came = group.all_to_all(plan.counts, [own] * n, [own] * n, "counts").view(n, own)  # from rank r, for mine
    send, receive = plan.counts.view(n, own).sum(1).tolist(), came.sum(1).tolist()
    arrived = group.all_to_all(rows, send, receive, "dispatch")  # by rank, and from each by expert
    expert = torch.arange(own, device=x.device).repeat(n).repeat_interleave(came.flatten())
    ones = weights.new_ones(len(expert), 1)
    out = grouped_experts(arrived, w1, w2, expert[:, None], ones, b1=b1, b2=b2, limit=limit, alpha=alpha)
    return combine(group.all_to_all(out, receive, send, "combine"), weights, plan)


class ExpertParallel(MoE):
    """A mixture whose w1, w2 and their biases are those of this rank's experts; all else is whole.

    Its shared experts run where the token lives. Attributes beside MoE's: `group`.
    """

    group: Group

    def routed(self, x: Float[Tensor, "T K"], routing: Routing) -> Float[Tensor, "T K"]:
        """The routed experts of all ranks, for this rank's tokens x (T, K)."""
        return exchanged_experts(
            x,
            self.w1,
            self.w2,
            routing.ids,
            routing.weights,
            group=self.group,
            b1=self.b1,
            b2=self.b2,
            limit=self.swiglu_limit,
            alpha=self.swiglu_alpha,
        )


def spread(decoder: Decoder, take: Slices, group: Group) -> None:
    """Make `decoder`, built from `take`, send its tokens to the experts of all ranks of `group`, in place.

    decoder.spec must say what its router chooses from: all experts.
    """
    for layer, block in enumerate(decoder.blocks):
        if isinstance(block.ffn, MoE):
            block.ffn = _whole_router(decoder, block.ffn, take.router(layer), group)


def _whole_router(decoder: Decoder, own: MoE, router: tuple, group: Group) -> ExpertParallel:
    layer = ExpertParallel.from_spec(decoder.spec, dtype=own.w1.dtype, device="meta")
    layer.group = group
    for name in ("w1", "w2", "b1", "b2", "shared_w1", "shared_w2", "shared_gate"):
        setattr(layer, name, getattr(own, name))
    matrix, bias, correction = router
    exact = torch.promote_types(own.w1.dtype, torch.float32)
    layer.router = nn.Parameter(matrix.clone(), requires_grad=False)
    if bias is not None:
        layer.router_bias = nn.Parameter(bias.to(exact).clone(), requires_grad=False)
    if correction is not None:
        layer.correction_bias = correction.to(exact).clone()
    return layer.requires_grad_(False).eval()
