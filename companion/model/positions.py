"""Which rotation each layer uses, from the configuration as it was read."""

import math
from collections.abc import Mapping
from typing import Any

from ..cost import ModelSpec
from ..rope import Rope
from .contradictions import number

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
