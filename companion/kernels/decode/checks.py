"""Everything that can be wrong with a decode call, found before anything is launched."""

import math
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from ...formats import FP8_E4M3, FP8_E5M2, INT4, INT8, KERNELS

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_DTYPES = {INT8: (torch.int8, torch.uint8), FP8_E4M3: (torch.uint8, torch.float8_e4m3fn)}
_DTYPES |= {FP8_E5M2: (torch.uint8, torch.float8_e5m2)}
CODES = {  # kv_format -> (dtypes of the codes, numbers per byte, with scales per: "token" or "group")
    name: (_DTYPES.get(f, (torch.uint8,)), f.per_byte, f.scales) for name, f in KERNELS.items()
}
FORMATS = ("none", *CODES)


@dataclass
class Call:
    """A decode call that has passed. Shapes as in `decode_attention`, q always (B, Sq, Hq, D)."""

    q: Tensor
    k: Tensor
    v: Tensor  # k itself when latent
    seqlens: Tensor
    tail: Tensor | None
    table: Tensor | None
    scales: dict[str, Tensor]  # of k_scale, k_zero, v_scale, v_zero those that are given
    latent: bool
    kv_format: str
    v_dim: int
    scale: float
    softcap: float
    left: int | None
    groups: tuple[int, int] = (1, 1)  # kivi: tokens of a key's group, channels of a value's
    capacity: int = field(init=False)  # keys that a sequence can have at most

    def __post_init__(self):
        slots = self.k.shape[1]
        self.capacity = slots if self.table is None else slots * self.table.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens of a page, 0 for a contiguous cache."""
        return 0 if self.table is None else self.k.shape[1]

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.v, self.seqlens, self.tail, self.table, *self.scales.values()

    @property
    def window(self) -> int | None:
        return None if self.left is None else self.left + 1


def check_call(
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    *,
    block_table=None,
    softmax_scale=None,
    window_size=(-1, -1),
    softcap=0.0,
    kv_format="none",
    k_scale=None,
    v_scale=None,
    k_zero=None,
    v_zero=None,
    head_dim_v=None,
    tail_seqlens=None,
) -> Call:
    """Shapes, dtypes, strides and options. Raises ValueError naming the argument."""
    if kv_format not in FORMATS:
        raise ValueError(f"kv_format={kv_format!r}; accepted: {', '.join(FORMATS)}")
    need(q.ndim in (3, 4), "q", q, "(B, Hq, D) or (B, Sq, Hq, D)")
    if q.dtype not in FLOATS:
        raise ValueError(f"q has dtype {q.dtype}; accepted: float16, bfloat16, float32")
    readable("q", q)
    q = q[:, None] if q.ndim == 3 else q
    B, Sq, Hq, D = q.shape
    need(D > 0 and Hq > 0, "q", q, "at least one head and one channel")
    per_byte = CODES[kv_format][1] if kv_format in CODES else 1
    k = _cache("k_cache", k_cache, D, q.dtype, kv_format, per_byte)
    pages, slots, Hkv = k.shape[:3]
    if Hkv == 0 or Hq % Hkv:
        raise ValueError(f"q has {Hq} heads and k_cache {Hkv}; q's must be a multiple of k_cache's")
    latent = v_cache is None
    if latent:
        if kv_format not in ("none", "int8", "fp8_e4m3", "fp8_e5m2"):
            raise ValueError(f"v_cache is None, and kv_format={kv_format!r} keeps values of its own")
        if not isinstance(head_dim_v, int) or not 0 < head_dim_v <= D:
            raise ValueError(f"head_dim_v={head_dim_v!r}; with v_cache=None need 1 to {D}, the values' share")
        v, v_dim = k, head_dim_v
    else:
        v_dim = v_cache.shape[-1] * per_byte if v_cache.ndim == 4 else 0
        if head_dim_v not in (None, v_dim):
            raise ValueError(f"head_dim_v={head_dim_v!r}, and v_cache has {v_dim} channels")
        v = _cache("v_cache", v_cache, v_dim, q.dtype, kv_format, per_byte)
        need(v.shape[:3] == k.shape[:3], "v_cache", v_cache, f"{tuple(k.shape[:3])} in front, as k_cache")
        need(v_dim > 0, "v_cache", v_cache, "at least one channel")
    _ids("cache_seqlens", cache_seqlens, (B,))
    if tail_seqlens is not None:
        _ids("tail_seqlens", tail_seqlens, (B,))
    if block_table is None:
        need(pages == B, "k_cache", k_cache, f"{B} sequences as q, or a block_table")
    else:
        _ids("block_table", block_table, (B, None))
        need(slots > 0, "k_cache", k_cache, "pages of at least one token")
    scales, groups = _scales(
        kv_format, k, v, D, v_dim, latent, k_scale=k_scale, k_zero=k_zero, v_scale=v_scale, v_zero=v_zero
    )
    return Call(
        q=q,
        k=k,
        v=v,
        seqlens=cache_seqlens,
        tail=tail_seqlens,
        table=block_table,
        scales=scales,
        latent=latent,
        kv_format=kv_format,
        v_dim=v_dim,
        scale=_number("softmax_scale", D**-0.5 if softmax_scale is None else softmax_scale),
        softcap=_number("softcap", softcap, least=0.0),
        left=_left(window_size),
        groups=groups,
    )


def check_device(call: Call, capability: tuple[int, int]) -> None:
    """What the device cannot do. bfloat16 needs capability 8.0: before, it is emulated or refused."""
    if capability < (8, 0) and call.q.dtype == torch.bfloat16:
        raise ValueError(
            f"q has dtype torch.bfloat16; this device has capability {capability[0]}.{capability[1]} and "
            "bfloat16 needs 8.0: use float16"
        )


def check_contents(call: Call) -> int:
    """Lengths and block numbers, which on a GPU have to be fetched. Returns the longest length."""
    lengths = call.seqlens.tolist()
    if any(n < 0 or n > call.capacity for n in lengths):
        name = "block_table" if call.table is not None and max(lengths) > call.capacity else "cache_seqlens"
        raise ValueError(
            f"{name}: lengths {lengths} must be from 0 to {call.capacity}, "
            + ("block_table's columns times the block size" if call.table is not None else "k_cache's slots")
        )
    behind = [0] * len(lengths) if call.tail is None else call.tail.tolist()
    if any(n < 0 for n in behind):
        raise ValueError(f"tail_seqlens={behind}; need 0 or more")
    if call.table is not None:
        size, pages = call.block_size, call.k.shape[0]
        for row, (ids, n, more) in enumerate(zip(call.table.tolist(), lengths, behind)):
            first = 0 if call.left is None else max(0, n + more - call.q.shape[1] - call.left)
            live = ids[first // size : -(-n // size)] if first < n else []
            if any(not 0 <= i < pages for i in live):
                raise ValueError(
                    f"block_table: row {row} has {live}; need block numbers from 0 to {pages - 1}"
                )
    return max(lengths, default=0)


def check_sinks(sinks: Tensor | None, heads: int) -> Tensor | None:
    """As float32."""
    if sinks is None:
        return None
    if sinks.shape != (heads,) or not sinks.is_floating_point():
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, dtype {sinks.dtype}; need ({heads},) floats")
    return sinks.detach().to(torch.float32).contiguous()


def need(good: bool, name: str, x: Tensor, what: str) -> None:
    if not good:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; need {what}")


def _cache(name, x, width, dtype, kv_format, per_byte) -> Tensor:
    """Codes as the bytes they are."""
    need(x.ndim == 4, name, x, "(B, S, Hkv, D), or (num_blocks, block_size, Hkv, D) with a block_table")
    need(
        x.shape[3] * per_byte == width, name, x, f"{width / per_byte:g} in the last axis for {width} channels"
    )
    accepted = CODES[kv_format][0] if kv_format in CODES else (dtype,)
    if x.dtype not in accepted:
        raise ValueError(
            f"{name} has dtype {x.dtype}; kv_format={kv_format!r} and q in {dtype} need "
            + " or ".join(map(str, accepted))
        )
    readable(name, x)
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.element_size() == 1 else x


def readable(name: str, x: Tensor) -> None:
    """Kernels step through the last axis by 1."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} has strides {x.stride()}; need 1 in the last axis")


def _ids(name, x, shape) -> None:
    good = x.ndim == len(shape) and all(s is None or s == n for s, n in zip(shape, x.shape))
    want = (
        "("
        + ", ".join("max_blocks" if s is None else str(s) for s in shape)
        + ("," * (len(shape) == 1))
        + ")"
    )
    need(good, name, x, want)
    if x.dtype != torch.int32:
        raise ValueError(f"{name} has dtype {x.dtype}; need torch.int32")
    readable(name, x)


def _number(name, x, least=-math.inf) -> float:
    if isinstance(x, bool) or not isinstance(x, Real) or not math.isfinite(x) or x < least:
        raise ValueError(
            f"{name}={x!r}; need a finite number" + (f" of at least {least:g}" if least == 0 else "")
        )
    return float(x)


def _left(window_size) -> int | None:
    good = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not good or any(isinstance(w, bool) or not isinstance(w, int) or w < -1 for w in window_size):
        raise ValueError(f"window_size={window_size!r}; need (left, right): integers, -1 for no bound")
    if window_size[1] > 0:
        raise ValueError(
            f"window_size={window_size!r}: a decoded token sees nothing to its right; need -1 or 0"
        )
    return None if window_size[0] < 0 else window_size[0]


def _scales(kv_format, k, v, D, v_dim, latent, **given) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Scales as tensors with the caches' first axes; a number becomes a view of one."""
    given = {name: x for name, x in given.items() if x is not None}
    per = CODES[kv_format][2] if kv_format in CODES else None
    if per is None and given:
        raise ValueError(f"{next(iter(given))} is given, and kv_format='none' has no scales")
    if latent and ("v_scale" in given or "v_zero" in given):
        raise ValueError("v_scale and v_zero must be None with v_cache=None: values are read as keys are")
    required = "sz" if per == "group" else "s" if kv_format in (INT8.kernel, INT4.kernel) else ""
    for kind, name in (("s", "scale"), ("z", "zero")):
        for side in "k" if latent else "kv":
            if kind in required and f"{side}_{name}" not in given:
                raise ValueError(f"{side}_{name} is None; kv_format={kv_format!r} needs it")
    if not latent and kv_format.startswith("fp8") and len({"k_scale", "v_scale"} & set(given)) == 1:
        raise ValueError("k_scale and v_scale: give both or neither")
    out, groups = {}, [1, 1]
    for name, x in given.items():
        side, kind = name.split("_")
        cache, width = (k, D) if side == "k" else (v, v_dim)
        if kind == "zero":
            if kv_format.startswith("fp8"):
                raise ValueError(f"{name} is given, and {kv_format} has no zeros")
            like = out.get(f"{side}_scale")
            if (
                like is None
                or not isinstance(x, Tensor)
                or (x.shape, x.stride()) != (like.shape, like.stride())
            ):
                raise ValueError(f"{name} must be a tensor of the shape and strides of {side}_scale")
        if not isinstance(x, Tensor):
            if per != "token":
                raise ValueError(f"{name} is a number; kv_format={kv_format!r} has scales per group")
            x = torch.full((), _number(name, x), device=cache.device).expand(cache.shape[:3])
        if x.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {x.dtype}; accepted: float16, bfloat16, float32")
        if per == "token":
            need(x.shape == cache.shape[:3], name, x, f"{tuple(cache.shape[:3])}, one per token and head")
        else:
            groups[side == "v"] = _group(name, x, cache, width, along_tokens=side == "k")
            readable(name, x)
        out[name] = x
    for side, cache in (("k", k),) if latent else (("k", k), ("v", v)):
        if kv_format == "int8" and (cache.dtype == torch.uint8) != (f"{side}_zero" in out):
            raise ValueError(f"{side}_zero: unsigned int8 codes need it, signed ones have none")
    return out, tuple(groups)


def _group(name, x, cache, width, along_tokens) -> int:
    """How many tokens of a channel, or channels of a token, share a scale: from the shape."""
    pages, slots, heads = cache.shape[:3]
    total, n = (slots, x.shape[1] if x.ndim == 4 else 0) if along_tokens else (width, x.shape[-1])
    size = total // n if n else 0
    shape = (pages, n, heads, width) if along_tokens else (pages, slots, heads, n)
    what = (
        f"({pages}, {slots} / group, {heads}, {width})"
        if along_tokens
        else f"({pages}, {slots}, {heads}, {width} / group)"
    )
    good = x.ndim == 4 and x.shape == shape and n * size == total and size >= 16 and size & (size - 1) == 0
    need(good or total == 0, name, x, f"{what}, with groups of a power of two from 16 on")
    return max(16, size)
