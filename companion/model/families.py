"""Thirteen architectures, each as a choice of parts: norm, attention, feed-forward, router, block.

Sizes come from the `ModelSpec`; what a family's configuration says beyond sizes is read with the defaults of
its own configuration class. A configuration that asks for something else is refused, never bent.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ..cost import ModelSpec
from .attention import Attention, HeadNormAttention, LatentAttention, WidthNormAttention
from .blocks import Block, FeedForward, OffsetRMSNorm, RMSNorm, SandwichBlock, WideRMSNorm
from .experts import ExpertWeights, interleaved, mixtral, mixture, separate
from .positions import check, number, score_scale
from .products import Tensors

Number = int | float
HEADS = {None: Attention, "head": HeadNormAttention, "full": WidthNormAttention}  # by spec.qk_norm


@dataclass(frozen=True)
class Family:
    """What an architecture is made of.

    attention: makes the attention of a layer. norm: of every layer and head. sandwich: norms behind the parts
    of a block as well. experts: reads the experts' matrices, None for a dense family. places, router: where a
    mixture's tensors may lie, and below that its router's. embedding_scaled: by sqrt(d_model). logit_cap: the
    bound on final logits, None for none.
    """

    attention: Callable[..., nn.Module]
    norm: type[RMSNorm] = RMSNorm
    sandwich: bool = False
    experts: Callable[..., ExpertWeights] | None = None
    places: tuple[str, ...] = ("mlp.",)
    router: str = "gate."
    embedding_scaled: bool = False
    logit_cap: Callable[[ModelSpec], Number | None] = lambda spec: None


def heads(spec: ModelSpec, layer: int, take: Tensors, norm: type[RMSNorm]) -> nn.Module:
    """Grouped-query attention with the norms on queries and keys that the model has."""
    return HEADS[spec.qk_norm](spec, layer, take, norm, softmax_scale=score_scale(spec))


def capped(spec: ModelSpec, layer: int, take: Tensors, norm: type[RMSNorm]) -> nn.Module:
    """Grouped-query attention whose scores are bounded (Gemma 2)."""
    cap = number(spec, "attn_logit_softcapping", 50.0, null=0.0)
    return Attention(spec, layer, take, norm, softmax_scale=score_scale(spec), softcap=cap)


def clipped(spec: ModelSpec, layer: int, take: Tensors, norm: type[RMSNorm]) -> nn.Module:
    """Grouped-query attention with norms over the full width, and a bound behind them (OLMoE)."""
    clip = number(spec, "clip_qkv", None)
    return WidthNormAttention(spec, layer, take, norm, softmax_scale=score_scale(spec), clip=clip)


def logit_cap(spec: ModelSpec) -> Number | None:
    """The bound on final logits (Gemma)."""
    default = 30.0 if spec.architecture == "gemma2" else None
    return number(spec, "final_logit_softcapping", default)


def latents(spec: ModelSpec, layer: int, take: Tensors, norm: type[RMSNorm]) -> nn.Module:
    """Attention over a latent (DeepSeek)."""
    return LatentAttention(spec, layer, take, norm, softmax_scale=score_scale(spec))


_GEMMA = {
    "norm": OffsetRMSNorm,
    "sandwich": True,
    "embedding_scaled": True,
    "logit_cap": logit_cap,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(heads),
    "mistral": Family(heads),
    "qwen2": Family(heads),
    "qwen3": Family(heads),
    "gemma2": Family(capped, **_GEMMA),
    "gemma3_text": Family(heads, **_GEMMA),
    "gemma3": Family(heads, **_GEMMA),
    "mixtral": Family(heads, experts=mixtral, places=("mlp.", "block_sparse_moe.")),
    "qwen3_moe": Family(heads, experts=separate),
    "olmoe": Family(clipped, experts=separate),
    "deepseek_v2": Family(latents, experts=separate),
    "deepseek_v3": Family(latents, experts=separate),
    "gpt_oss": Family(heads, norm=WideRMSNorm, experts=interleaved, router="router."),
    "glm4_moe": Family(heads, experts=separate),
}

FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]  # the same code under another name


def family_of(spec: ModelSpec) -> Family:
    """The family of a model. Raises ValueError for one that is not there, and for a spec that can't be."""
    if spec.architecture not in FAMILIES:
        raise ValueError(
            f"architecture={spec.architecture!r} is not supported; accepted: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[spec.architecture]
    check(spec, sparse=family.experts is not None, latent=family.attention is latents)
    return family


def block(family: Family, spec: ModelSpec, layer: int, take: Tensors) -> Block:
    """Layer `layer` of a model of this family, from the tensors below the layer's own prefix."""

    def norm(name: str) -> nn.Module:
        return family.norm(take(f"{name}.weight", spec.d_model), spec.norm_eps)

    attention = family.attention(spec, layer, take.under("self_attn."), family.norm)
    if family.experts is None or spec.moe.is_dense(layer):
        ffn = FeedForward(take.under("mlp."), spec.d_model, spec.ffn, spec.act, spec.mlp_bias)
    else:
        ffn = mixture(spec, take, family.experts, family.places, family.router)
    first = norm("input_layernorm")
    if family.sandwich:
        after = norm("post_attention_layernorm"), norm("post_feedforward_layernorm")
        return SandwichBlock(first, attention, norm("pre_feedforward_layernorm"), ffn, *after)
    return Block(first, attention, norm("post_attention_layernorm"), ffn)
