"""What the decode kernels compute, in torch: the same arguments, sequence by sequence, nothing in flight."""

import torch
from torch import Tensor

from ...attention import sdpa
from ...formats import INT4, KERNELS
from ...quantize import unpack

FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
BITS = {name: f.bits for name, f in KERNELS.items() if f.per_byte > 1}


def decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    kv_format: str = "none",
    k_scale=None,
    v_scale=None,
    k_zero=None,
    v_zero=None,
    head_dim_v: int | None = None,
    tail_seqlens: Tensor | None = None,
    return_lse: bool = False,
    **options,
):
    """What `decode_attention` computes, in float32. options: softmax_scale, softcap, sinks."""
    Sq, outs = q.shape[1] if q.ndim == 4 else 1, []
    for b, n in enumerate(cache_seqlens.tolist()):
        pages = [b] if block_table is None else block_table[b, : -(-n // k_cache.shape[1])].long()
        k = dequantize(k_cache[pages], kv_format, _of(k_scale, pages), _of(k_zero, pages), "k")
        v = k[..., :head_dim_v]
        if v_cache is not None:
            v = dequantize(v_cache[pages], kv_format, _of(v_scale, pages), _of(v_zero, pages), "v")
        k, v = (x.flatten(0, 1)[:n].transpose(0, 1)[None] for x in (k, v))  # (1, Hkv, n, D)
        at = n + (0 if tail_seqlens is None else int(tail_seqlens[b])) - Sq + torch.arange(Sq)[:, None]
        seen = torch.arange(n) <= at
        if window_size[0] >= 0:
            seen &= torch.arange(n) >= at - window_size[0]
        row = q[b].float().view(1, Sq, *q.shape[-2:]).transpose(1, 2)
        outs.append(sdpa(row, k, v, key_mask=seen[None].to(q.device), return_lse=True, **options))
    out, lse = (torch.cat(x) for x in zip(*outs))  # (B, Hq, Sq, Dv), (B, Hq, Sq)
    out = out.transpose(1, 2).to(q.dtype)
    if q.ndim == 3:
        out, lse = out[:, 0], lse[:, :, 0]
    return (out, lse) if return_lse else out


def dequantize(x: Tensor, kv_format: str, scale=None, zero=None, side: str = "k") -> Tensor:
    """Pages (P, S, Hkv, width) as float32 (P, S, Hkv, D)."""
    if kv_format in FLOAT8:
        x = x.view(FLOAT8[kv_format])
    elif kv_format in BITS:
        x = unpack(x, BITS[kv_format])
    x = x.to(torch.float32)
    if kv_format == INT4.kernel and zero is None:
        x = x - 8
    if scale is None:
        return x
    if kv_format.startswith("kivi"):
        axis = 1 if side == "k" else 3
        scale, zero = (t.repeat_interleave(x.shape[axis] // t.shape[axis], axis) for t in (scale, zero))
    elif isinstance(scale, Tensor):
        scale, zero = (None if t is None else t[..., None] for t in (scale, zero))
    return x * scale + (0 if zero is None else zero)


def _of(x, pages):
    return x[pages] if isinstance(x, Tensor) else x
