"""Writing new keys and values into a cache, contiguous or paged, quantized on the way if asked.

Writing and attending are separate calls with the same `cache_seqlens`: the lengths that include the new
tokens. A slot is `block * block_size + offset`; a token without a place (slot -1) is skipped.
"""

import math
from numbers import Real

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...formats import INT4, KERNELS
from ..mode import on, triton_for

__all__ = ["append"]

FORMATS = ("none", *(name for name, f in KERNELS.items() if f.scales == "token"))


FLOATS = (torch.float16, torch.bfloat16, torch.float32)


FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


_INTS = (torch.int32, torch.int64)


def append(
    k: Float[Tensor, "*tokens Hkv D"],
    v: Float[Tensor, "*tokens Hkv Dv"] | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    slot_mapping: Int[Tensor, "*tokens"] | None = None,
    cache_seqlens: Int[Tensor, " B"] | None = None,
    new_tokens: Int[Tensor, " B"] | None = None,
    block_table: Int[Tensor, "B max_blocks"] | None = None,
    kv_format: str = "none",
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
) -> None:
    """Store the keys and values of new tokens, (B, S, Hkv, D) or (T, Hkv, D), in a cache.

    k_cache, v_cache: (num_blocks, block_size, Hkv, D); a contiguous cache is (B, S_max, Hkv, D), a block for
        each row. v and v_cache None: there is only one (MLA's latent). Any strides, but the last is 1.

    Where to, one of two:
    slot_mapping: (T,) or (B, S), int32 or int64, the slot of each token.
    cache_seqlens: (B,) tokens of each row when this call is done. The S tokens of k end there; (T, Hkv, D)
        is one token for each of B = T rows. new_tokens: (B,) of the S, how many are real; the rest, on the
        right, is padding. block_table: (B, max_blocks) for a paged cache.
    Skipped: negative slots, slots and blocks beyond the cache, positions before 0 or beyond a row's table or
        room (so a row with cache_seqlens 0 is idle). Nothing is ever written elsewhere. Two tokens for one
        slot: either may win.

    kv_format, with what is stored for each token and head:
        "none"      the numbers, rounded to the cache's dtype if that is another (float16, bfloat16, float32)
        "int8"      int8 codes and scale (num_blocks, block_size, Hkv); with zero, uint8 codes 0 to 255
        "int4"      uint8, two codes a byte, the even index low; scale; zero, or without one a middle of 8
        "fp8_e4m3", "fp8_e5m2"   uint8 (or the float8 dtype itself), saturating; scale: None, a number that
                    all are divided by, or a tensor like int8's, and each token and head gets its own
        The bytes are those of `companion.quantize.codec` on a CPU: integers with symmetric=(zero is None),
        fp8 with tensor_scale=, or with all of a head as one group. Scales are rounded up and zeros down in
        their own dtype. A token with NaN, infinity or a number beyond 2**126, for which a codec raises, gets
        the scale NaN; fp8 without scales keeps NaN, and infinity saturates.

    Raises ValueError, before anything is written, for shapes, dtypes, strides and devices that do not fit.
    """
    places = dict(slot_mapping=slot_mapping, cache_seqlens=cache_seqlens, new_tokens=new_tokens)
    fields = (k_scale, v_scale, k_zero, v_zero)
    k, v, k_cache, v_cache = check_append(
        k, v, k_cache, v_cache, kv_format, fields, block_table=block_table, **places
    )
    (k_scale, k_unit), (v_scale, v_unit) = (
        (x, 1.0) if x is None or isinstance(x, Tensor) else (None, float(x)) for x in (k_scale, v_scale)
    )
    triton_for(k, v, k_cache, v_cache, k_scale, v_scale, k_zero, v_zero, block_table, *places.values())
    (B, S, Hkv, D), Dv = k.shape, 1 if v is None else v.shape[3]
    if not k.numel():
        return
    from .kernel import append_kernel

    if slot_mapping is not None:
        slot_mapping = slot_mapping.reshape(-1)
    constants = tiles(D, Dv)
    with on(k):
        append_kernel[(-(-B * S // constants["BLOCK_T"]), Hkv)](
            k, v, k_cache, v_cache, k_scale, k_zero, v_scale, v_zero, k_unit, v_unit,
            slot_mapping, cache_seqlens, new_tokens, block_table,
            B * S, S, *k_cache.shape[:2], 0 if block_table is None else block_table.shape[1],
            *_strides(k), *_strides(v), *_strides(k_cache), *_strides(v_cache),
            *_strides(k_scale), *_strides(v_scale), 0 if block_table is None else block_table.stride(0),
            **constants, FORMAT=kv_format, num_warps=4,
        )  # fmt: skip


def tiles(D: int, Dv: int) -> dict[str, int]:
    """The kernel's constants for these widths: about 2,048 numbers of k for each program."""
    wide, wide_v = (1 << (n - 1).bit_length() for n in (D, Dv))
    return {
        "D": D,
        "DV": Dv,
        "BLOCK_D": wide,
        "BLOCK_DV": wide_v,
        "BLOCK_T": max(1, 2048 // max(wide, wide_v)),
    }


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    """Of the first three axes; a scale for all numbers has none."""
    return (0, 0, 0) if x is None or x.ndim < 3 else x.stride()[:3]


def check_append(
    k, v, k_cache, v_cache, kv_format, fields, *, slot_mapping, cache_seqlens, new_tokens, block_table
):
    """k and v with four axes, and the caches as bytes where they are float8, once everything fits."""
    if kv_format not in FORMATS:
        raise ValueError(f"kv_format={kv_format!r}; accepted: {', '.join(map(repr, FORMATS))}")
    if (slot_mapping is None) == (cache_seqlens is None):
        raise ValueError("need either slot_mapping or cache_seqlens, and not both")
    if k.ndim not in (3, 4):
        raise ValueError(f"k has shape {tuple(k.shape)}; need (T, Hkv, D) or (B, S, Hkv, D)")
    if (v is None) != (v_cache is None):
        raise ValueError("v and v_cache go together: need both, or neither")
    lead = tuple(k.shape[:-2])
    _index("slot_mapping", slot_mapping, lead)
    _index("cache_seqlens", cache_seqlens, lead[:1])
    for name, x in (("new_tokens", new_tokens), ("block_table", block_table)):
        if x is not None and cache_seqlens is None:
            raise ValueError(f"{name} goes with cache_seqlens, not with slot_mapping")
    _index("new_tokens", new_tokens, lead[:1])
    if block_table is not None:
        _index("block_table", block_table, (*lead[:1], block_table.shape[-1]))
        if block_table.shape[1] > 1 and block_table.stride(1) != 1:
            raise ValueError(f"block_table has strides {block_table.stride()}; need the last to be 1")
    elif cache_seqlens is not None and k_cache.shape[0] != lead[0]:
        raise ValueError(
            f"k_cache has {k_cache.shape[0]} rows and k {lead[0]}; need as many, or a block_table"
        )
    k_scale, v_scale, k_zero, v_zero = fields
    out = []
    for n, x, cache, scale, zero in (("k", k, k_cache, k_scale, k_zero), ("v", v, v_cache, v_scale, v_zero)):
        if x is None:
            if scale is not None or zero is not None:
                raise ValueError(f"{n}_scale and {n}_zero need {n}, which is None")
            out.append((None, None))
            continue
        if tuple(x.shape[:-1]) != tuple(k.shape[:-1]) or x.dtype not in FLOATS or x.dtype != k.dtype:
            raise ValueError(
                f"{n} is {x.dtype} {tuple(x.shape)}; need float16, bfloat16 or float32, as k, and "
                f"{tuple(k.shape[:-1])} in front"
            )
        out.append((x if x.ndim == 4 else x[:, None], _cache(n, x, cache, k_cache, kv_format, scale, zero)))
        _last_stride(n, x)
    (k, k_cache), (v, v_cache) = out
    return k, v, k_cache, v_cache


def _cache(name, x, cache, k_cache, kv_format, scale, zero):
    """This cache, as bytes if it is float8, once it and its scale and zero fit x (..., Hkv, D)."""
    D = x.shape[-1]
    if kv_format == INT4.kernel and D % 2:
        raise ValueError(f"{name} has {D} channels; int4 needs an even number")
    shape = (*k_cache.shape[:2], x.shape[-2], D // 2 if kv_format == INT4.kernel else D)
    needed = {
        "none": FLOATS,
        "int8": (torch.int8 if zero is None else torch.uint8,),
        INT4.kernel: (torch.uint8,),
    }.get(kv_format) or (torch.uint8, FLOAT8[kv_format])
    if k_cache.ndim != 4 or tuple(cache.shape) != shape or cache.dtype not in needed:
        raise ValueError(
            f"{name}_cache is {cache.dtype} {tuple(cache.shape)}; need {' or '.join(map(str, needed))}, "
            f"(num_blocks, block_size, {shape[2]}, {shape[3]}), the same blocks for k and v"
        )
    _last_stride(f"{name}_cache", cache)
    _scale(name, shape[:3], kv_format, scale, zero)
    return cache.view(torch.uint8) if kv_format in FLOAT8 else cache


def _scale(name, shape, kv_format, scale, zero) -> None:
    """scale and zero of caches whose tokens and heads have this shape."""
    if scale is not None and kv_format == "none":
        raise ValueError(f"{name}_scale: kv_format 'none' has none")
    if zero is not None and not kv_format.startswith("int"):
        raise ValueError(f"{name}_zero: kv_format {kv_format!r} has none")
    if isinstance(scale, Real) and kv_format in FLOAT8:
        if isinstance(scale, bool) or not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"{name}_scale={scale!r}; need a finite number above 0")
    elif scale is None:
        if kv_format.startswith("int"):
            raise ValueError(f"{name}_scale is None; {kv_format} needs a float tensor {shape}")
    elif not isinstance(scale, Tensor) or tuple(scale.shape) != shape or scale.dtype not in FLOATS:
        got = f"{scale.dtype} {tuple(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
        raise ValueError(f"{name}_scale is {got}; need a float tensor {shape}")
    elif zero is not None:
        if (zero.shape, zero.dtype, zero.stride()) != (scale.shape, scale.dtype, scale.stride()):
            raise ValueError(f"{name}_zero needs shape, dtype and strides of {name}_scale")


def _index(name, x, shape) -> None:
    if x is not None and (tuple(x.shape) != tuple(shape) or x.dtype not in _INTS):
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; need int32 or int64, {tuple(shape)}")


def _last_stride(name, x) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} has strides {x.stride()}; the last must be 1")
