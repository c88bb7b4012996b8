"""Decoders with random weights: as fast as trained ones, which is all that a comparison of shapes needs.

Swapping the heads of a trained model is no experiment, since its projections change their shape; two random
models of equal everything else are.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..cost import ModelSpec, models
from ..model import Decoder

FAMILIES = ("llama", "mixtral")


def random_decoder(
    spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Decoder:
    """A decoder of this shape, of the Llama or the Mixtral family. Raises ValueError for another."""
    if spec.architecture not in FAMILIES:
        raise ValueError(f"random weights for {spec.architecture}: accepted are {', '.join(FAMILIES)}")
    d, D = spec.d_model, spec.head_dim
    shapes = {
        "model.embed_tokens.weight": (spec.vocab, d),
        "lm_head.weight": (spec.vocab, d),
        "self_attn.q_proj.weight": (spec.heads * D, d),
        "self_attn.k_proj.weight": (spec.kv_heads * D, d),
        "self_attn.v_proj.weight": (spec.kv_heads * D, d),
        "self_attn.o_proj.weight": (d, spec.heads * D),
        "mlp.gate_proj.weight": (spec.ffn, d),
        "mlp.up_proj.weight": (spec.ffn, d),
        "mlp.down_proj.weight": (d, spec.ffn),
    }
    if spec.moe:
        E, N = spec.moe.experts, spec.moe.ffn
        shapes |= {"mlp.gate.weight": (E, d), "mlp.experts.gate_up_proj": (E, 2 * N, d)}
        shapes |= {"mlp.experts.down_proj": (E, d, N)}
    numbers = torch.Generator(device).manual_seed(seed)

    def take(name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(d, dtype=dtype, device=device)
        part = name.split(".", 3)[-1] if name.startswith("model.layers.") else name
        if part not in shapes:
            raise ValueError(f"no tensor {name!r}")
        x = torch.randn(shapes[part], generator=numbers, dtype=dtype, device=device)
        return x.mul_(shapes[part][-1] ** -0.5)  # so that no layer overflows

    return Decoder(spec, take).eval()


def with_heads(spec: ModelSpec, kv_heads: int) -> ModelSpec:
    """The same model with another number of key-value heads."""
    return replace(spec, name=f"{spec.name}, {kv_heads} key heads", kv_heads=kv_heads)


def as_mixture(spec: ModelSpec, experts: int, top_k: int) -> ModelSpec:
    """A mixture with as many parameters active per token: an expert has 1 / top_k of the width.

    Raises ValueError if top_k does not divide the feed-forward width.
    """
    if spec.ffn % top_k:
        raise ValueError(f"top_k={top_k} does not divide the feed-forward width {spec.ffn}")
    moe = replace(models["mixtral-8x7b"].moe, experts=experts, top_k=top_k, ffn=spec.ffn // top_k)
    return replace(spec, name=f"{spec.name}, {experts} experts", architecture="mixtral", moe=moe)
