"""Thirteen architectures, each as a choice of parts: norm, attention, feed-forward, router, block.

Sizes come from the `ModelSpec`; what a family's configuration says beyond sizes is read with the defaults of
its own configuration class. A configuration that asks for something else is refused, never bent.

Read from it are the rotation of each layer, and what is refused: fields that contradict each other, and what
no part here computes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..checks import choice, positive
from ..cost import ModelSpec
from ..rope import Rope
from .attention import Attention, HeadNormAttention, LatentAttention, WidthNormAttention
from .blocks import (
    ACTIVATIONS,
    Block,
    ExpertWeights,
    FeedForward,
    OffsetRMSNorm,
    RMSNorm,
    SandwichBlock,
    WideRMSNorm,
    interleaved,
    mixtral,
    mixture,
    separate,
)
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
    family = FAMILIES[choice("architecture", spec.architecture, FAMILIES)]
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


LOCAL_THETA = 10000.0  # Gemma 3's base in layers with a window, where a file does not say


def ropes(spec: ModelSpec) -> tuple[Rope, Rope | None]:
    """The rotation of the model, and that of its windowed layers where it is another one (Gemma 3).

    Raises ValueError for a base that is missing, or given twice with different values.
    """
    _check_theta(spec)
    if spec.mla is not None:
        # DeepSeek-V2's code always pairs neighbours; V3's has a switch.
        interleaved = spec.extra.get("rope_interleave")
        if interleaved is None or spec.architecture == "deepseek_v2":
            interleaved = True
        options = dict(theta=spec.rope_theta, scaling=spec.rope_scaling, interleaved=interleaved)
        return Rope(spec.mla.rope_dim, **options), None
    full = Rope(spec.head_dim, theta=spec.rope_theta, scaling=spec.rope_scaling, partial=spec.partial_rotary)
    return full, _local_rope(spec) if spec.architecture in ("gemma3", "gemma3_text") else None


def score_scale(spec: ModelSpec) -> float | None:
    """The factor on attention scores where it is not head_dim ** -0.5; None where it is."""
    if spec.architecture in ("gemma2", "gemma3", "gemma3_text"):
        return number(spec, "query_pre_attn_scalar", 256, null=256) ** -0.5
    if spec.mla is None:
        return None
    # YaRN's temperature, of which Rope's attention_factor has been divided out by mscale_all_dim.
    scaling, scale = spec.rope_scaling or {}, spec.mla.qk_dim**-0.5
    weight, factor = scaling.get("mscale_all_dim"), scaling.get("factor", 1)
    if weight and factor > 1:
        scale *= (0.1 * weight * math.log(factor) + 1.0) ** 2
    return scale


def _local_rope(spec: ModelSpec) -> Rope:
    """Gemma 3's windowed layers: a base of their own, and no scaling unless the file gives them one."""
    given = spec.extra.get("rope_parameters") or {}
    scaling = dict(given.get("sliding_attention") or {}) if isinstance(given, Mapping) else {}
    theta = scaling.pop("rope_theta", None) or spec.extra.get("rope_local_base_freq") or LOCAL_THETA
    return Rope(spec.head_dim, theta=theta, scaling=scaling or None)


def _check_theta(spec: ModelSpec) -> None:
    given = set(_thetas(spec.extra))
    # A spec made by hand has no configuration; of Llama's first files and Gemma 3's the default is known.
    known = not spec.extra or spec.architecture in ("llama", "gemma3", "gemma3_text")
    if spec.rope_theta is None or not (given or known):
        raise ValueError(f"{spec.name}: rope_theta is missing; a default would give fluent nonsense")
    if len(given) > 1:
        raise ValueError(f"{spec.name}: rope_theta is given as {' and as '.join(map(str, sorted(given)))}")


def _thetas(config: Mapping[str, Any]):
    """Every base that the configuration gives to the layers that see all tokens."""
    for ropes in (config, config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(ropes, Mapping):
            inner = ropes.get("full_attention")
            theta = (inner if isinstance(inner, Mapping) else ropes).get("rope_theta")
            if theta is not None:
                yield theta


def number(spec: ModelSpec, field: str, default: Any, *, null: Any = None) -> Any:
    """A positive number of the configuration; `default` if the field is absent, `null` if it is null."""
    value = spec.extra.get(field, default)
    if value is None:
        return null
    positive(field, value, owner=spec.name)
    return value


def check(spec: ModelSpec, *, sparse: bool, latent: bool) -> None:
    """Raise a ValueError, naming the field, if `spec` does not fit a family.

    sparse, latent: whether the family has experts, and attention over a latent.
    """
    config, name = spec.extra, spec.name

    def refuse(field: str, accepted: str) -> None:
        raise ValueError(f"{name}: {field} must be {accepted}, got {config.get(field)!r}")

    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise ValueError(f"{name}: weights are quantized ({method}); only 16- and 32-bit ones are read")
    choice("activation", spec.act, ACTIVATIONS, owner=name)
    if config.get("use_bidirectional_attention"):
        refuse("use_bidirectional_attention", "false")
    if spec.architecture in ("gemma3", "gemma3_text") and config.get("attn_logit_softcapping") is not None:
        refuse("attn_logit_softcapping", "null, as this family bounds its final logits only")
    if sparse and spec.moe is None:
        raise ValueError(f"{name}: no experts; {spec.architecture} has some, so their number is missing")
    if sparse and spec.mlp_bias:
        raise ValueError(f"{name}: mlp_bias must be false, as with all experts but gpt-oss's own, got True")
    if not sparse and spec.moe is not None:
        raise ValueError(f"{name}: {spec.moe.experts} experts; {spec.architecture} has none")
    if latent:
        _check_latent(spec, refuse)
    elif spec.mla is not None:
        refuse("kv_lora_rank", f"none, since {spec.architecture} caches keys and values")


def _check_latent(spec: ModelSpec, refuse) -> None:
    m, config = spec.mla, spec.extra
    if m is None:
        raise ValueError(f"{spec.name}: kv_lora_rank is missing; {spec.architecture} caches a latent")
    # Against the configuration's own fields: those of the spec may have been replaced.
    nope, turning = config.get("qk_nope_head_dim", 0), config.get("qk_rope_head_dim", 0)
    if config.get("qk_head_dim", nope + turning) != nope + turning:
        refuse("qk_head_dim", f"{nope + turning}, the sum of qk_nope_head_dim and qk_rope_head_dim")
    if config.get("head_dim") not in (None, turning, nope + turning):
        refuse("head_dim", f"{turning}, that is qk_rope_head_dim")
    if config.get("num_key_value_heads") not in (None, config.get("num_attention_heads")):
        refuse("num_key_value_heads", f"{config.get('num_attention_heads')}, that is num_attention_heads")
    if spec.sliding_layers:
        raise ValueError(f"{spec.name}: layers with a window are not supported over a latent")
