"""Few rows on a CPU, by code that Numba compiles: a product, and a decode step through all layers at once.

The loops are in `cpu_loops.py` and `cpu_step.py`, imported when first used.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int8
from torch import Tensor

from . import LEAST_TILES, flat
from .pool import threads

__all__ = ["linear_on_cpu"]

NO_SCALE = np.empty(0, np.float32)
ROWS = 8  # up to here these loops are faster than a library's product
# Addresses of a layer's weights and stores, 0 for what it lacks; the tokens that it sees, 0 for all.
LAYER = np.dtype([
    (name, np.int64)
    for name in (
        "attention_norm", "qkv", "qkv_scale", "qkv_bias", "q_norm", "k_norm", "o", "o_scale",
        "ffn_norm", "gate_up", "gate_up_scale", "down", "down_scale", "k", "v", "window",
    )
])  # fmt: skip
# What layers have in common. gelu: SiLU otherwise. scale: on scores, whose softmax takes powers of 2.
SPEC = np.dtype(
    [(name, np.int64) for name in ("heads", "kv_heads", "head_dim", "ffn", "gelu")]
    + [("eps", np.float32), ("scale", np.float32)]
)


def linear_on_cpu(
    x: Float[Tensor, "*rows K"],
    weight: Float[Tensor, "out K"] | Int8[Tensor, "out K"],
    bias: Float[Tensor, " out"] | None = None,
    *,
    scale: Float[Tensor, " out"] | None = None,
) -> Float[Tensor, "*rows out"]:
    """F.linear(x, weight, bias) on a CPU in float32, the matrix read once, as it lies: for up to 8 rows.

    x: (..., in), weight: (out, in), float32, or int8 with a scale (out,) by which its rows are multiplied.
    bias: (out,). More rows are right too, and slower than by a library. No gradient passes. It uses as many
    threads as torch does.

    Raises ValueError for another dtype or device, a weight with gaps, and shapes that do not fit; ImportError
    where Numba is missing, or refuses this numpy.
    """
    matrix = torch.float32 if scale is None else torch.int8
    for name, t in (("x", x), ("weight", weight), ("bias", bias), ("scale", scale)):
        need = matrix if name == "weight" else torch.float32
        if t is not None and (t.dtype != need or not t.is_cpu):
            raise ValueError(f"{name} is {t.dtype} on {t.device}; need {need} on a CPU")
    if weight.ndim != 2 or not weight.is_contiguous():
        raise ValueError(f"weight has shape {tuple(weight.shape)}; need (out, in), without gaps")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}; need (..., {weight.shape[1]})")
    for name, t in (("bias", bias), ("scale", scale)):
        if t is not None and t.shape != weight.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; need ({weight.shape[0]},)")
    return linear(x.detach(), weight, None if bias is None else bias.detach(), scale)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """The same, unchecked."""
    out, width = weight.shape
    y = torch.empty(*x.shape[:-1], out)
    if y.numel():
        with threads() as n_threads:
            from .loops import linear

            rows = x.reshape(-1, width).contiguous()
            factors = NO_SCALE if scale is None else scale.detach().contiguous().numpy()
            linear(rows.numpy(), weight.detach().numpy(), factors, n_threads, y.view(-1, out).numpy())
    return y if bias is None else y + bias


def step(
    x: Float[Tensor, "B d"],
    layers: np.ndarray,
    like: Tensor,
    spec: np.ndarray,
    cos: Float[Tensor, "B half"] | Float[Tensor, "1 half"],
    sin: Float[Tensor, "B half"] | Float[Tensor, "1 half"],
    k_cache: Float[Tensor, "P S Hkv D"],
    v_cache: Float[Tensor, "P S Hkv D"],
    table: Tensor | None,
    before: Sequence[int],
) -> None:
    """x (B, d) through all layers, in place, unchecked; keys and values of one token per row are written.

    layers: (L,) of LAYER, like: one of their matrices, spec: () of SPEC. k_cache, v_cache: the first layer's,
    in the kernels' layout; all lie alike. table: int32 (B, columns), or None where row b has page b. before:
    tokens that each row had.
    """
    with threads() as n_threads:
        from .loops import step

        step(
            x.numpy(),
            layers,
            like.detach()[:0].numpy(),
            spec[()],
            cos.contiguous().numpy(),
            sin.contiguous().numpy(),
            k_cache.stride()[:3],
            v_cache.stride()[:3],
            len(flat(k_cache)),
            len(flat(v_cache)),
            np.arange(len(x), dtype=np.int32)[:, None] if table is None else table.contiguous().numpy(),
            k_cache.shape[1],
            np.array(before, np.int64),
            n_threads,
            LEAST_TILES,
        )
