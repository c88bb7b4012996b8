"""Everything that can be wrong with a cache write, found before anything is launched."""

import math
from numbers import Real

import torch
from torch import Tensor

FORMATS = ("none", "int8", "int4", "fp8_e4m3", "fp8_e5m2")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_INTS = (torch.int32, torch.int64)


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
    if kv_format == "int4" and D % 2:
        raise ValueError(f"{name} has {D} channels; int4 needs an even number")
    shape = (*k_cache.shape[:2], x.shape[-2], D // 2 if kv_format == "int4" else D)
    wanted = {
        "none": FLOATS,
        "int8": (torch.int8 if zero is None else torch.uint8,),
        "int4": (torch.uint8,),
    }.get(kv_format) or (torch.uint8, FLOAT8[kv_format])
    if k_cache.ndim != 4 or tuple(cache.shape) != shape or cache.dtype not in wanted:
        raise ValueError(
            f"{name}_cache is {cache.dtype} {tuple(cache.shape)}; need {' or '.join(map(str, wanted))}, "
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
