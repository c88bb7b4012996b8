"""On a CPU by code that Numba compiles: decode attention, products of few rows, and whole decode steps.

The loops are in `attention.py` and `loops.py`, imported when first used.

Numba is an extra, `cpu`; `companion.attend` comes here under `use("compiled")`. The first call on a machine
compiles, for some ten seconds; what comes out is kept on disk, beside the source or in Numba's own folder.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from ..decode.checks import check_call, check_contents, check_sinks
from .pool import threads

__all__ = ["decode_on_cpu", "linear_on_cpu"]

Number = int | float
LEAST_BYTES = 2_000_000  # of keys and values in one piece: from here on this beats torch's products
LEAST_TILES = 8  # of a part: waking a thread costs more than fewer take
LOG2E = 1.4426950408889634


def decode_on_cpu(
    q: Float[Tensor, "B Hq D"],
    k_cache: Float[Tensor, "P S Hkv D"],
    v_cache: Float[Tensor, "P S Hkv Dv"],
    cache_seqlens: Int32[Tensor, " B"],
    *,
    block_table: Int32[Tensor, "B blocks"] | None = None,
    softmax_scale: Number | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: Number = 0.0,
    sinks: Float[Tensor, " Hq"] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's last token over its cache on a CPU in float32, keys and values read once.

    Names, layouts and meaning are those of `decode_attention`. q: (B, Hq, D). k_cache, v_cache: (B, S, Hkv,
    D), or with a block_table pages (num_blocks, block_size, Hkv, D); any strides but the last, which is 1.
    cache_seqlens: int32 (B,), the query's own key included. It uses as many threads as torch does.

    Returns out (B, Hq, Dv) and, if asked, lse (B, Hq), natural logarithm, without the sinks. A query without
    keys has output 0 and LSE -inf. No gradient passes.

    Raises ValueError naming the argument; ImportError where Numba is missing, or refuses this numpy.
    """
    options = dict(softmax_scale=softmax_scale, softcap=softcap)
    call = check_call(
        q, k_cache, v_cache, cache_seqlens, block_table=block_table, window_size=window_size, **options
    )
    if q.ndim != 3 or q.dtype != torch.float32 or not all(t is None or t.is_cpu for t in call.tensors()):
        raise ValueError(
            f"q has shape {tuple(q.shape)}, {q.dtype}, on {q.device}; need (B, Hq, D), float32, all on a CPU"
        )
    sinks = check_sinks(sinks, q.shape[1])
    check_contents(call)
    out, lse = run(
        q.detach(), k_cache.detach(), v_cache.detach(), cache_seqlens.tolist(), block_table,
        window=call.window, sinks=sinks, **options,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def run(q, k_cache, v_cache, stops, table, *, window=None, softmax_scale=None, softcap=0.0, sinks=None):
    """The call itself, unchecked. stops: a list of lengths. Returns (out, lse)."""
    (B, Hq, D), (size, Hkv), Dv = q.shape, k_cache.shape[1:3], v_cache.shape[3]
    stop = np.array(stops, np.int64)
    first = np.zeros(B, np.int64) if window is None else np.maximum(stop - window, 0)
    keys = (sum(stops) if window is None else int((stop - first).sum())) * Hkv
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    out, lse = np.empty((B * Hkv, Hq // Hkv, Dv), np.float32), np.empty((B * Hkv, Hq // Hkv), np.float32)
    with threads() as n_threads:
        from .attention import TILE, decode

        decode(
            q.reshape(B * Hkv, Hq // Hkv, D).numpy(),
            flat(k_cache),
            flat(v_cache),
            k_cache.stride()[:3],
            v_cache.stride()[:3],
            np.arange(B, dtype=np.int32)[:, None] if table is None else table.numpy(),
            size,
            first,
            stop,
            max(1, min(n_threads, keys // TILE // LEAST_TILES)),
            np.float32(scale if softcap else scale * LOG2E),
            float(softcap),
            np.empty((0, 0), np.float32) if sinks is None else sinks.float().reshape(Hkv, -1).numpy(),
            out,
            lse,
        )
    return torch.from_numpy(out).view(B, Hq, Dv), torch.from_numpy(lse).view(B, Hq)


def flat(t: Tensor) -> np.ndarray:
    """All memory from a tensor's first number to its last, in one line."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) if t.numel() else 0
    return t.as_strided((span,), (1,)).numpy()


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
