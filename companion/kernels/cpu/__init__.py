"""Decode attention on a CPU, by code that Numba compiles (`attention.py`, imported when first used).

Numba is an extra, `cpu`; `companion.attend` comes here under `use("compiled")`. The first call on a machine
compiles, for some ten seconds; what comes out is kept on disk, beside the source or in Numba's own folder.
"""

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from ..decode.checks import check_call, check_contents, check_sinks
from .pool import threads

__all__ = ["decode_on_cpu"]

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
