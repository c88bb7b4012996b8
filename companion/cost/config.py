"""The one parser of Hugging Face configurations: a dict or a `config.json` becomes a `ModelSpec`.

It follows what the model's own configuration class would do with the file: class defaults for what
is missing, nested language models, windows in some layers, latent attention, experts. Anything it
cannot count is an error that names the field, never a guess.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from .families import FIXED, MOE_FIXED, SAME_AS, WINDOW_EVERYWHERE
from .reader import Reader, language_model, read_config
from .refusals import refuse
from .routing import routing_of
from .spec import MLASpec, ModelSpec, MoESpec, whole

_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "sliding"}


def _rope(read: Reader) -> tuple[float | None, dict | None, float]:
    """Base, scaling (None for the plain one) and rotated share of the head."""
    ropes = read.raw("rope_parameters")
    if ropes is None:
        ropes = read.raw("rope_scaling")
    ropes = {} if ropes is None else ropes
    if not isinstance(ropes, Mapping):
        raise ValueError(f"{read.owner}: rope_scaling must be an object or null, got {ropes!r}")
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
        if not isinstance(listed, list | tuple) or len(listed) != layers:
            size = len(listed) if isinstance(listed, list | tuple) else listed
            raise ValueError(f"{read.owner}: layer_types must list num_hidden_layers={layers}, got {size!r}")
        for entry in listed:
            if not isinstance(entry, str) or entry not in _LAYER_TYPES:
                accepted = ", ".join(_LAYER_TYPES)
                raise ValueError(f"{read.owner}: layer_types may hold {accepted}; got {entry!r}")
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
        every = whole(read.owner, "sliding_window_pattern", pattern)
        types = tuple("full" if (i + 1) % every == 0 else "sliding" for i in range(layers))
        return (window if "sliding" in types else None), types
    if kind in WINDOW_EVERYWHERE:
        return window, ("sliding",) * layers
    # An unknown family does not say which layers its window holds in: count the larger cache.
    return None, ("full",) * layers


def _mla(read: Reader) -> MLASpec | None:
    if read.raw("kv_lora_rank") is None:
        return None
    return MLASpec(
        kv_rank=read.integer("kv_lora_rank"),
        nope_dim=read.integer("qk_nope_head_dim"),
        rope_dim=read.integer("qk_rope_head_dim"),
        v_dim=read.integer("v_head_dim"),
        q_rank=read.integer("q_lora_rank", None),
    )


def _moe(read: Reader, kind: str, ffn: int, layers: int) -> MoESpec | None:
    experts = read.integer("num_experts", None, zero=True)
    if not experts:
        return None
    width = read.integer("moe_intermediate_size", ffn)
    shared, shared_ffn = read.integer("n_shared_experts", 0, zero=True), 0
    if shared:
        shared_ffn = shared * width
    elif kind == "llama4_text":
        shared, shared_ffn = 1, width
    elif read.raw("shared_expert_intermediate_size"):
        shared, shared_ffn = 1, read.integer("shared_expert_intermediate_size")
    top_k = read.integer("num_experts_per_tok")
    if top_k > experts:
        raise ValueError(f"{read.owner}: num_experts_per_tok must be at most {experts}, got {top_k}")
    step, every = read.integer("decoder_sparse_step", 1), read.integer("moe_layer_freq", 1)
    dense = {i for i in range(layers) if (i + 1) % step or i % every}
    for field, keep in (("mlp_only_layers", True), ("moe_layers", False)):
        listed = read.raw(field)
        if listed is None:
            continue
        if not isinstance(listed, list | tuple):
            raise ValueError(f"{read.owner}: {field} must be a list of layers, got {listed!r}")
        listed = {whole(read.owner, field, i, zero=True) for i in listed}
        dense |= listed if keep else set(range(layers)) - listed
    return MoESpec(
        experts=experts,
        top_k=top_k,
        ffn=width,
        shared=shared,
        shared_ffn=shared_ffn,
        first_dense=min(read.integer("first_k_dense_replace", 0, zero=True), layers),
        dense_layers=tuple(sorted(i for i in dense if i < layers)),
        **MOE_FIXED.get(kind, {}),
        **routing_of(read, kind, experts, top_k),
    )


def parse_config(config: Mapping | str | os.PathLike, name: str | None = None) -> ModelSpec:
    """A `ModelSpec` from a Hugging Face configuration.

    config  a dict, or a path to `config.json` or to the folder that holds it
    name    what to call the model; by default the folder's name, else the model type

    Raises ValueError naming the field that is missing, ill-typed or inconsistent.
    """
    data, stem = read_config(config)
    data = language_model(data)
    kind = data.get("model_type") or "unknown"
    if not isinstance(kind, str):
        raise ValueError(f"config: model_type must be a string, got {kind!r}")
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
    mla = _mla(read)
    head_dim = mla.qk_dim if mla else read.integer("head_dim", None)
    if head_dim is None:
        if d_model % heads:
            raise ValueError(
                f"{read.owner}: head_dim is missing and hidden_size={d_model} is not a multiple of "
                f"num_attention_heads={heads}"
            )
        head_dim = d_model // heads
    if heads % kv_heads:
        raise ValueError(
            f"{read.owner}: num_key_value_heads must divide num_attention_heads={heads}, got {kv_heads}"
        )
    moe = _moe(read, family, ffn, layers)
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
    return ModelSpec(
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
