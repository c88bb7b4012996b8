"""What a configuration says beyond sizes, and what it may not: fields that contradict each other, and what no
part here computes.
"""

import math
from typing import Any

from ..cost import ModelSpec
from .feedforward import ACTIVATIONS


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
