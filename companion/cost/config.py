"""The one parser of Hugging Face configurations: a dict or a `config.json` becomes a `ModelSpec`.

It follows what the model's own configuration class would do with the file: class defaults for what
is missing, nested language models, windows in some layers, latent attention, experts. Anything it
cannot count is an error that names the field, never a guess.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checks import choice, positive, require, whole
from .families import DEFAULTS, FIXED, SAME_AS, WINDOW_EVERYWHERE, refuse
from .parts import mla_of, moe_of

_NESTED = ("text_config", "language_config", "llm_config")
_ALIASES = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions",),
    "hidden_activation": ("hidden_act", "activation_function"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "shared_expert_intermediate_size": ("shared_intermediate_size",),
    "sliding_window_pattern": ("_sliding_window_pattern",),
}


class Reader:
    """Reads checked fields of one configuration, with the family's defaults behind it."""

    def __init__(self, config: Mapping, kind: str, owner: str):
        self.config, self.owner = config, owner
        self.defaults = DEFAULTS.get(kind, {})

    def raw(self, field: str, default: Any = None) -> Any:
        names = [n for n in (field, *_ALIASES.get(field, ())) if n in self.config]
        for name in names:
            if self.config[name] is not None:
                return self.config[name]
        # An explicit null switches a family's default off (Mistral v0.2: "sliding_window": null).
        return None if names else self.defaults.get(field, default)

    def integer(self, field: str, default: Any = ..., *, zero: bool = False) -> Any:
        value = self.raw(field)
        if value is None:
            if default is ...:
                raise ValueError(f"{self.owner}: {field} is missing")
            return default
        for name in (field, *_ALIASES.get(field, ())):
            if self.config.get(name) not in (None, value):
                raise ValueError(f"{self.owner}: {field} is {value!r}, but {name} is {self.config[name]!r}")
        return whole(field, value, 0 if zero else 1, owner=self.owner)

    def text(self, field: str, default: str) -> str:
        value = self.raw(field)
        require(value is None or isinstance(value, str), field, "a string", value, owner=self.owner)
        return value or default

    def number(self, field: str, value: Any) -> float:
        return positive(field, value, owner=self.owner)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.raw(field)
        if value is None:
            return default
        require(isinstance(value, bool), field, "true or false", value, owner=self.owner)
        return value


def read_config(config: Mapping | str | os.PathLike) -> tuple[dict, str | None]:
    """The configuration as a dict, and a name taken from the path (None for a dict)."""
    if isinstance(config, Mapping):
        return dict(config), None
    is_path = isinstance(config, str | os.PathLike)
    require(is_path, "config", "a dict or a path to config.json", type(config))
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"config: cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"config: {path} is not JSON: {error}") from None
    require(isinstance(data, dict), str(path), "a JSON object", type(data), owner="config")
    stem = path.parent.resolve().name if path.stem == "config" else path.stem
    return data, stem or None


def language_model(config: dict) -> dict:
    """The part that describes the language model; a vision tower is not counted."""
    for key in _NESTED:
        inner = config.get(key)
        if inner is None:
            continue
        require(isinstance(inner, Mapping), key, "an object", inner, owner="config")
        merged = dict(inner)
        for field in ("model_type", "tie_word_embeddings"):
            if field in config and merged.get(field) is None:
                merged[field] = config[field]
        return merged
    return config


_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "sliding"}


def _rope(read: Reader) -> tuple[float | None, dict | None, float]:
    """Base, scaling (None for the plain one) and rotated share of the head."""
    ropes = read.raw("rope_parameters")
    if ropes is None:
        ropes = read.raw("rope_scaling")
    ropes = {} if ropes is None else ropes
    require(isinstance(ropes, Mapping), "rope_scaling", "an object or null", ropes, owner=read.owner)
    if isinstance(ropes.get("full_attention"), Mapping):  # one entry per layer type (Gemma 3, OLMo 3)
        ropes = ropes["full_attention"]
    ropes = dict(ropes)
    theta = ropes.pop("rope_theta", None)
    theta = read.raw("rope_theta") if theta is None else theta
    partial = ropes.pop("partial_rotary_factor", None)
    partial = read.raw("partial_rotary_factor", 1.0) if partial is None else partial
    plain = ropes.get("rope_type", ropes.get("type", "default")) == "default"
    theta = 10000.0 if theta is None else read.number("rope_theta", theta)
    return theta, (None if plain else ropes), read.number("partial_rotary_factor", partial)


def _layer_types(read: Reader, kind: str, layers: int) -> tuple[int | None, tuple[str, ...]]:
    """The window (None if no layer has one) and the type of every layer."""
    listed = read.raw("layer_types")
    window = read.integer("sliding_window", None, zero=True) or None
    if listed is not None:
        require(isinstance(listed, list | tuple), "layer_types", "a list", listed, owner=read.owner)
        fits = f"of num_hidden_layers={layers} entries"
        require(len(listed) == layers, "layer_types", fits, len(listed), owner=read.owner)
        for i, entry in enumerate(listed):
            choice(f"layer_types[{i}]", entry, _LAYER_TYPES, owner=read.owner)
        if "chunked_attention" in listed:  # a chunk is at most this long: an upper bound on the cache
            window = read.integer("attention_chunk_size")
        types = tuple(_LAYER_TYPES[t] for t in listed)
        return (window if "sliding" in types else None), types
    if window is None or not read.flag("use_sliding_window", True):
        return None, ("full",) * layers
    if "max_window_layers" in read.defaults:  # Qwen: the first so many layers stay full
        first = read.integer("max_window_layers", zero=True)
        types = tuple("sliding" if i >= first else "full" for i in range(layers))
        return (window if "sliding" in types else None), types
    pattern = read.raw("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):  # "LLLG", the last layer full
        types = tuple("sliding" if pattern[i % len(pattern)] == "L" else "full" for i in range(layers))
        return window, types
    if pattern is not None:
        every = whole("sliding_window_pattern", pattern, owner=read.owner)
        types = tuple("full" if (i + 1) % every == 0 else "sliding" for i in range(layers))
        return (window if "sliding" in types else None), types
    if kind in WINDOW_EVERYWHERE:
        return window, ("sliding",) * layers
    # An unknown family does not say which layers its window holds in: count the larger cache.
    return None, ("full",) * layers


def read_fields(config: Mapping | str | os.PathLike, name: str | None = None) -> dict[str, Any]:
    """The fields of a `ModelSpec`, out of a Hugging Face configuration.

    config  a dict, or a path to `config.json` or to the folder that holds it
    name    what to call the model; by default the folder's name, else the model type

    Raises ValueError naming the field that is missing, ill-typed or inconsistent.
    """
    data, stem = read_config(config)
    data = language_model(data)
    kind = data.get("model_type") or "unknown"
    require(isinstance(kind, str), "model_type", "a string", kind, owner="config")
    family = SAME_AS.get(kind, kind)
    name = name or stem or kind
    read = Reader(data, family, f"config of {name!r}")
    fixed = dict(FIXED.get(family, {}))
    refuse(data, family, read.owner)
    d_model = read.integer("hidden_size")
    layers = read.integer("num_hidden_layers")
    heads = read.integer("num_attention_heads")
    ffn = read.integer("intermediate_size", 4 * d_model if family == "gpt2" else ...)
    kv_heads = read.integer("num_key_value_heads", 1 if read.flag("multi_query") else heads)
    mla = mla_of(read)
    head_dim = mla.qk_dim if mla else read.integer("head_dim", None)
    if head_dim is None:
        if d_model % heads:
            raise ValueError(
                f"{read.owner}: head_dim is missing and hidden_size={d_model} is not a multiple of "
                f"num_attention_heads={heads}"
            )
        head_dim = d_model // heads
    fits = f"a divisor of num_attention_heads={heads}"
    require(heads % kv_heads == 0, "num_key_value_heads", fits, kv_heads, owner=read.owner)
    moe = moe_of(read, family, ffn, layers)
    if moe and read.flag("mlp_bias"):
        raise ValueError(f"{read.owner}: mlp_bias is true; biases beside experts are not counted")
    window, types = _layer_types(read, family, layers)
    theta, scaling, partial = _rope(read)
    everywhere = read.flag("use_bias")  # StarCoder2's one switch
    attention_bias = everywhere or read.flag("attention_bias", read.flag("qkv_bias"))
    if family == "llama4_text" and data.get("intermediate_size_mlp") is not None:
        ffn = read.integer("intermediate_size_mlp")
    if family in ("glm4_moe", "cohere") and read.flag("use_qk_norm"):
        fixed["qk_norm"] = "head" if family == "glm4_moe" else "full"
    positions = read.integer("max_position_embeddings", None)
    if family == "gpt2":
        theta, fixed["position_rows"] = None, positions or 0
    return dict(
        name=name,
        architecture=kind,
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=heads if mla else kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=read.integer("vocab_size"),
        tied=read.flag("tie_word_embeddings"),
        max_context=positions,
        norm_eps=read.number("rms_norm_eps", read.raw("rms_norm_eps") or 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        partial_rotary=partial,
        window=window,
        layer_types=types,
        mla=mla,
        moe=moe,
        qkv_bias=attention_bias,
        o_bias=fixed.pop("o_bias", attention_bias),
        mlp_bias=everywhere or read.flag("mlp_bias"),
        act=read.text("hidden_activation", "silu"),
        mtp_layers=read.integer("num_nextn_predict_layers", 0, zero=True),
        extra=data,
        **fixed,
    )
