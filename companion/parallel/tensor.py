"""Tensor parallelism: every rank a narrower model, and two sums per layer.

A rank's part of a decoder is a decoder: some of the heads, a slice of every feed-forward's width. Its shape
is `companion.cost.rank_spec`; its weights are slices of the whole model's, cut as they are asked for; its
parts are those of `companion.model`, under their own names. What makes the parts one model is an all-reduce
behind each attention and each feed-forward, where every rank has a partial sum:

    columns of q, k, v (rows, as they are stored)   ->  own heads        ->  rows of o     ->  sum
    columns of gate, up                             ->  own width        ->  rows of down  ->  sum

A bias behind the second product is added by one rank. Norms, embedding, head and routers are whole on every
rank.
Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..caches import make_cache
from ..cost import ModelSpec, rank_spec
from ..model import Decoder
from ..model.attention import WidthNormAttention
from ..model.blocks import Block
from ..model.norms import RMSNorm
from .collectives import Group
from .expert import spread
from .slices import Slices


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
    expert: ranks that run tokens of their own and share the experts of all (see `companion.parallel.expert`).
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
    if expert.size > 1:
        spread(decoder, take, expert)
    if tensor.size > 1:
        for layer in decoder.blocks:
            _reduce(layer, tensor)
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


def _reduce(block: Block, group: Group) -> None:
    """Add up what the ranks' parts of a block give. Hooks, so that parts keep their names and types."""
    block.attention.register_forward_hook(lambda part, args, out: group.all_reduce(out, "attention"))
    block.ffn.register_forward_hook(lambda part, args, out: group.all_reduce(out, "feed-forward"))
    if isinstance(block.attention, WidthNormAttention):
        for name in ("q_norm", "k_norm"):
            setattr(block.attention, name, SharedNorm(getattr(block.attention, name), group))
