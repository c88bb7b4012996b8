"""What a configuration says beyond sizes: which rotation each layer uses, and what is refused.

Refused are fields that contradict each other, and what no part here computes.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..cost import ModelSpec
from ..rope import Rope
from .blocks import ACTIVATIONS

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
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{spec.name}: {field}={value!r}; need a positive finite number")
    return value


def check(spec: ModelSpec, *, sparse: bool, latent: bool) -> None:
    """Raise a ValueError, naming the field, if `spec` does not fit a family.

    sparse, latent: whether the family has experts, and attention over a latent.
    """
    config, name = spec.extra, spec.name

    def refuse(field: str, accepted: str) -> None:
        raise ValueError(f"{name}: {field}={config.get(field)!r}; accepted: {accepted}")

    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise ValueError(f"{name}: weights are quantized ({method}); only 16- and 32-bit ones are read")
    if spec.act not in ACTIVATIONS:
        raise ValueError(
            f"{name}: activation {spec.act!r} is not supported; accepted: {', '.join(ACTIVATIONS)}"
        )
    if config.get("use_bidirectional_attention"):
        refuse("use_bidirectional_attention", "false")
    if spec.architecture in ("gemma3", "gemma3_text") and config.get("attn_logit_softcapping") is not None:
        refuse("attn_logit_softcapping", "null, as this family bounds its final logits only")
    if sparse and spec.moe is None:
        raise ValueError(f"{name}: no experts; {spec.architecture} has some, so their number is missing")
    if sparse and spec.mlp_bias:
        raise ValueError(f"{name}: mlp_bias=True; accepted: false, as with all experts but gpt-oss's own")
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
