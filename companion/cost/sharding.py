"""What one rank holds of a split model: heads and widths over `tensor` ranks, experts over `expert` ones.

The shape of a rank's part is a ModelSpec again, so every count of this package works on it:
`kv_bytes(rank_spec("llama-3.1-8b", tensor=4), 8192)` is the cache of one rank.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from .counts import expert_parameters, parameters
from .registry import resolve_model
from .spec import ModelSpec, whole


def rank_spec(
    model: ModelSpec | str, *, tensor: int = 1, expert: int = 1, split_vocab: bool = False
) -> ModelSpec:
    """The shape of one rank's part of `model`.

    tensor  ranks among which heads, and the widths of feed-forwards and experts, are divided. Key-value heads
            are too while they last; with more ranks than heads, each is kept by tensor / kv_heads ranks.
            A latent is kept by all.
    expert  ranks (or groups of `tensor` ranks) among which the experts are divided. The result still says
            `moe.experts` of them: that is what its router chooses from.
    split_vocab  the rows of the embedding and of the head are divided over the tensor ranks too, rounded up,
            as vLLM and SGLang do; `companion.parallel` keeps both whole

    Raises ValueError, naming what does not divide.
    """
    model = resolve_model(model)
    tensor, expert = whole("rank_spec", "tensor", tensor), whole("rank_spec", "expert", expert)
    moe = model.moe
    _divides(model, "tensor", tensor, "heads", model.heads)
    if model.mla is None and model.kv_heads % tensor and tensor % model.kv_heads:
        raise ValueError(
            f"{model.name}: tensor={tensor} must divide kv_heads={model.kv_heads}, or be a multiple of it"
        )
    if model.moe_layers < model.layers:
        _divides(model, "tensor", tensor, "ffn", model.ffn)
    if moe is None:
        if expert > 1:
            raise ValueError(f"{model.name}: expert={expert}, but the model has no experts; accepted: 1")
    else:
        _divides(model, "tensor", tensor, "moe.ffn", moe.ffn)
        _divides(model, "tensor", tensor, "moe.shared_ffn", moe.shared_ffn)
        _divides(model, "expert", expert, "moe.experts", moe.experts)
        moe = replace(moe, ffn=moe.ffn // tensor, shared_ffn=moe.shared_ffn // tensor)
    heads = model.heads // tensor
    kv_heads = heads if model.mla else max(1, model.kv_heads // tensor)
    width = model.ffn // tensor if model.moe_layers < model.layers else model.ffn
    vocab = -(-model.vocab // tensor) if split_vocab else model.vocab
    return replace(model, heads=heads, kv_heads=kv_heads, ffn=width, moe=moe, vocab=vocab)


def rank_parameters(
    model: ModelSpec | str, *, tensor: int = 1, expert: int = 1, split_vocab: bool = False
) -> int:
    """Parameters that one rank holds: norms and routers whole, the embedding and the head too unless
    `split_vocab`, the rest divided.

    Biases behind a divided product count on every rank: those that must not be added twice are zeros there.
    """
    part = rank_spec(model, tensor=tensor, expert=expert, split_vocab=split_vocab)
    count = parameters(part)
    if part.moe is not None:
        gone = part.moe.experts - part.moe.experts // expert
        count -= part.moe_layers * gone * expert_parameters(part)
    return count


def cache_copies(model: ModelSpec | str, tensor: int) -> Fraction:
    """How many times the cache is stored over `tensor` ranks that share a sequence: 1 is each number once.

    kv_heads ranks are the most that hold different heads; from there on the caches are copies, and memory
    for tokens no longer grows with the ranks. Latent attention has one vector for all heads, so every rank
    holds all of it: `tensor` copies from the start.

    >>> [int(cache_copies("llama-3.1-8b", n)) for n in (1, 8, 16)], int(cache_copies("deepseek-v3", 8))
    ([1, 1, 2], 8)
    """
    model = resolve_model(model)
    return Fraction(tensor * rank_spec(model, tensor=tensor).cached_width, model.cached_width)


def _divides(model: ModelSpec, argument: str, ranks: int, field: str, size: int) -> None:
    if size % ranks:
        raise ValueError(f"{model.name}: {argument}={ranks} must divide {field}={size}")
