"""Decoders with random weights: as fast as trained ones, which is all that a comparison of shapes needs.

Swapping the heads of a trained model is no experiment, since its projections change their shape; two random
models of equal everything else are.
"""

from dataclasses import replace

import torch

from ..cost import ModelSpec, models
from ..model import Decoder
from ..parallel.weights import RandomWeights

FAMILIES = ("llama", "mixtral")


def random_decoder(
    spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Decoder:
    """A decoder of this shape, of the Llama or the Mixtral family. Raises ValueError for another."""
    if spec.architecture not in FAMILIES:
        raise ValueError(f"random weights for {spec.architecture}: accepted are {', '.join(FAMILIES)}")
    return Decoder(spec, RandomWeights(spec, seed, dtype=dtype, device=device)).eval()


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
