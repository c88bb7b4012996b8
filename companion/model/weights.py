"""A decoder again, its matrices in fewer bits (weight-only quantisation: activations stay as they are)."""

import copy

import torch
from torch import nn

from ..checks import choice, require
from ..formats import dtype_name
from ..moe import MoE
from .attention import Attention, LatentAttention
from .blocks import FeedForward
from .decoder import Decoder
from .products import Int8Matrix, Int8MoE

DTYPES = ("int8",)
MATRICES: dict[type[nn.Module], tuple[str, ...]] = {
    Attention: ("qkv", "o"),
    LatentAttention: ("down", "q_up", "k_up", "v_up", "o"),
    FeedForward: ("gate_up", "down"),
}


def quantize_weights(decoder: nn.Module, dtype: str | torch.dtype = "int8") -> Decoder:
    """The same model with its matrices in int8 and a scale per output channel; `decoder` is left as it was.

    decoder: a `Decoder` of any family, on any device. dtype: "int8".

    Every matrix that a step reads whole is quantized: attention, feed-forward, experts and the output head,
    with it an embedding that is tied to it. Norms, biases, sinks and routers stay as they are, and are shared
    with `decoder`; so does an embedding of its own, of which a step reads a row per token.

    Bytes: one per weight of a matrix, and per output channel a scale of 4 (2 in a bfloat16 model);
    `weights_bytes` counts both. Logits are those of a model whose weights are off by 1/254 of the largest in
    their row at most. The cache's precision is another choice, made where the cache is.

    Raises ValueError for another dtype, for a decoder that is quantized already or holds parts that are not
    this package's (a rank's share of a model), and for weights with NaN or infinity in them.
    """
    choice("dtype", dtype_name(dtype), DTYPES)
    require(isinstance(decoder, Decoder), "decoder", "a companion.model.Decoder", type(decoder))
    loaded = decoder.weight_format is None
    require(loaded, "decoder", "a model as loaded, not quantized already", decoder.weight_format)
    for name, part in decoder.named_modules():
        if not (type(part).__module__.startswith(f"{__package__}.") or type(part) in (MoE, nn.ModuleList)):
            raise ValueError(f"decoder: {name} is a {type(part).__name__}; only whole models are quantized")
    shared = [*decoder.parameters(), *decoder.buffers(), decoder.spec]
    twin = copy.deepcopy(decoder, {id(x): x for x in shared})
    twin.weight_format = dtype_name(dtype)
    for name, part in list(twin.named_modules()):
        for kind, matrices in MATRICES.items():
            if isinstance(part, kind):
                for matrix in matrices:
                    _replace(part, matrix, f"{name}.{matrix}")
    for layer, block in enumerate(twin.blocks):
        if isinstance(block.ffn, MoE):
            block.ffn = _named(f"blocks.{layer}.ffn", Int8MoE.of, block.ffn, twin.spec)
    tied = twin.output is twin.embedding
    _replace(twin, "output", "output")
    if tied:
        del twin.embedding
        twin.embedding = twin.output
    return twin


def _replace(part: nn.Module, name: str, place: str) -> None:
    weight = getattr(part, name)
    if weight is not None:
        matrix = _named(place, Int8Matrix, weight)
        delattr(part, name)  # torch refuses to put a module where a parameter was
        setattr(part, name, matrix)


def _named(place: str, make, *arguments):
    try:
        return make(*arguments)
    except ValueError as e:
        raise ValueError(f"decoder: {place}: {e}") from None
