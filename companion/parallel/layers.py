"""A decoder on several ranks: narrower layers with two sums each, or experts to which the tokens travel.

With tensor parallelism a rank's part of a decoder is a decoder: some of the heads, a slice of every
feed-forward's width. Its shape is `companion.cost.rank_spec`, its parts are those of `companion.model`, under
their own names. What makes the parts one model is an all-reduce behind each attention and each feed-forward,
where every rank has a partial sum:

    columns of q, k, v (rows, as they are stored)   ->  own heads        ->  rows of o     ->  sum
    columns of gate, up                             ->  own width        ->  rows of down  ->  sum

A bias behind the second product is added by one rank. Norms, embedding, head and routers are whole on all.
Source: Shoeybi et al. 2019 (Megatron-LM), section 3.

In expert parallelism the experts stay where they are, and the tokens travel. Each rank owns some of the
experts and has some of the tokens. Per layer with experts:

    route       every rank its own tokens, over all experts: routers are whole everywhere
    dispatch    rows sorted by expert, so those for one rank are neighbours; counts first, then rows
    compute     each rank its experts, on rows from all ranks
    combine     rows back the way they came, then weighted and added where the token lives

A token sent to k experts travels k times, each time as a row of d_model numbers, there and back; its weights
stay at home. Ranks with no tokens, ranks that get none and experts without rows take part all the same.
Sources: Lepikhin et al. 2020 (GShard), section 3; the DeepSeek-V3 report, section 3.2.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ..caches import make_cache
from ..cost import ModelSpec, rank_spec
from ..model import Decoder
from ..model.attention import WidthNormAttention
from ..model.blocks import RMSNorm
from ..moe import MoE, Routing, combine, dispatch, gather, grouped_experts
from .collectives import Group, Number
from .weights import Slices


def shard(
    spec: ModelSpec,
    weights: Mapping[str, Tensor] | Callable[[str], Tensor],
    *,
    tensor: Group | None = None,
    expert: Group | None = None,
) -> Decoder:
    """This rank's part of a model, as a `Decoder` that gives the whole model's logits.

    spec, weights: of the whole model, as for `Decoder`. Tensors are asked for one by one and cut, so a lazy
        mapping (`companion.model.load.SafeTensors`) never has more than one of them whole in memory.
    tensor: ranks that run the same tokens, each with its heads and widths.
    expert: ranks that run tokens of their own and share the experts of all (see `companion.parallel.layers`).
        Either may be None: a group of this rank alone. With both, see `mesh`.

    The decoder's `spec` is that of the part: a cache is made from it, `make_cache(kind, decoder.spec, ...)`.
    Its calls are collective: all ranks make them together, those of a `tensor` group with the same ids.

    Raises ValueError, before any communication, for ranks that do not divide what they must.
    """
    tensor, expert = tensor or Group(), expert or Group()
    part = rank_spec(spec, tensor=tensor.size, expert=expert.size)
    take = Slices(spec, weights, tensor=(tensor.rank, tensor.size), expert=(expert.rank, expert.size))
    decoder = Decoder(take.part, take).eval()
    decoder.spec = part
    for layer, block in enumerate(decoder.blocks):
        if expert.size > 1 and isinstance(block.ffn, MoE):
            block.ffn = _spread(decoder, block.ffn, take.router(layer), expert)
        if tensor.size > 1:
            # Hooks, so that parts keep their names and types.
            block.attention.register_forward_hook(lambda part, args, out: tensor.all_reduce(out, "attention"))
            block.ffn.register_forward_hook(lambda part, args, out: tensor.all_reduce(out, "feed-forward"))
            for name in ("q_norm", "k_norm") if isinstance(block.attention, WidthNormAttention) else ():
                setattr(block.attention, name, SharedNorm(getattr(block.attention, name), tensor))
    return decoder


def cache_nbytes(
    spec: ModelSpec, ranks: int, *, batch: int = 1, max_tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[int, int]:
    """(bytes of one rank's cache, bytes of all ranks' together), from a cache on the meta device.

    With key-value heads the second is that of one device, until there are more ranks than heads. With a
    latent it grows with the ranks: each holds everything (`companion.cost.cache_copies`).
    """
    part = rank_spec(spec, tensor=ranks)
    kind = "contiguous" if spec.mla is None else "latent"
    one = make_cache(kind, part, batch=batch, max_tokens=max_tokens, dtype=dtype, device="meta").nbytes
    return one, ranks * one


class SharedNorm(nn.Module):
    """An RMSNorm over the heads of all ranks: the mean square is theirs together (OLMoE).

    Heads that several ranks keep enter as often as each other, so they don't move the mean.
    """

    def __init__(self, norm: RMSNorm, group: Group):
        super().__init__()
        self.weight, self.eps, self.group = norm.weight, norm.eps, group

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        square = self.group.all_reduce(wide.square().mean(-1, keepdim=True), "query-key norms")
        normed = wide * torch.rsqrt(square / self.group.size + self.eps)
        return normed.to(x.dtype) * self.weight


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
            x, self.w1, self.w2, routing.ids, routing.weights, group=self.group, b1=self.b1, b2=self.b2,
            limit=self.swiglu_limit, alpha=self.swiglu_alpha,
        )  # fmt: skip


def _spread(decoder: Decoder, own: MoE, router: tuple, group: Group) -> ExpertParallel:
    """`own`, a rank's mixture, with the whole model's router: its tokens go to the experts of all ranks."""
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
