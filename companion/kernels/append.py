"""Writing new keys and values into a cache, contiguous or paged, quantized on the way if asked.

Writing and attending are separate calls with the same `cache_seqlens`: the lengths that include the new
tokens. A slot is `block * block_size + offset`; a token without a place (slot -1) is skipped.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..quantize import codec
from ..quantize.codec import LIMIT
from .append_checks import FLOAT8, check_append
from .mode import triton_for
from .specimen import Expect, Specimen


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
    from .append_kernel import append_kernel

    if slot_mapping is not None:
        slot_mapping = slot_mapping.reshape(-1)
    constants = tiles(D, Dv)
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


def append_twin(
    k, v, k_cache, v_cache, *, slot_mapping=None, cache_seqlens=None, new_tokens=None, block_table=None,
    kv_format="none", k_scale=None, v_scale=None, k_zero=None, v_zero=None,
):  # fmt: skip
    """The same in torch, with the codecs of `companion.quantize`."""
    (num_blocks, size), Hkv = k_cache.shape[:2], k.shape[-2]
    slots = slot_mapping
    if slots is None:
        S = k.shape[1] if k.ndim == 4 else 1
        slots = slots_of(cache_seqlens, S, new_tokens, block_table, size)
    slots = slots.reshape(-1).long()
    kept = ((slots >= 0) & (slots < num_blocks * size)).nonzero()[:, 0]
    at = slots[kept] // size, slots[kept] % size
    for x, cache, scale, zero in ((k, k_cache, k_scale, k_zero), (v, v_cache, v_scale, v_zero)):
        if x is not None:
            codes, *fields = _encoded(x.reshape(-1, Hkv, x.shape[-1])[kept], cache, kv_format, scale, zero)
            cache[at] = codes
            for store, field in zip((scale, zero), fields):
                store[at] = field


def slots_of(
    cache_seqlens: Int[Tensor, " B"],
    S: int,
    new_tokens: Int[Tensor, " B"] | None = None,
    block_table: Int[Tensor, "B max_blocks"] | None = None,
    block_size: int = 1,
) -> Int[Tensor, "B S"]:
    """The slot of each of S new tokens a row, int64 (B, S); -1 where it has none. The twin of `_place`.

    Without a table a row's block is its own number, and block_size its room.
    """
    row = torch.arange(len(cache_seqlens), device=cache_seqlens.device)[:, None]
    i = torch.arange(S, device=row.device)[None]
    count = S if new_tokens is None else new_tokens.long()[:, None]
    position = cache_seqlens.long()[:, None] - count + i
    table = row if block_table is None else block_table.long()
    ok = (i < count) & (position >= 0) & (position < table.shape[1] * block_size)
    block = table.gather(1, torch.where(ok, position // block_size, 0)) if table.numel() else -1
    return torch.where(ok & (block >= 0), block * block_size + position % block_size, -1)


def _encoded(x, cache, kv_format, scale, zero):
    """Rows x (n, Hkv, D) as this cache stores them: codes, then scale and zero where there are any."""
    if kv_format == "none":
        return (x.to(cache.dtype),)
    x = x.float()
    if kv_format in FLOAT8 and not isinstance(scale, Tensor):
        c = codec(kv_format, tensor_scale=scale)
        codes = c.quantize(x.nan_to_num(0.0).clamp(-LIMIT, LIMIT)).codes.view(torch.uint8)
        nan = torch.where(x.signbit(), 0xFF, 0x7F).to(torch.uint8)
        return (torch.where(x.isnan(), nan, codes).view(cache.dtype),)
    good = x.abs().amax(-1, keepdim=True) <= LIMIT  # NaN compares False
    options = {"group": x.shape[-1]} if kv_format in FLOAT8 else {"symmetric": zero is None}
    qt = codec(kv_format, scale_dtype=scale.dtype, **options).quantize(torch.where(good, x, 0.0))
    fields = [qt.scale.masked_fill(~good, torch.nan)] + ([] if zero is None else [qt.zero])
    codes = qt.codes.view(cache.dtype) if kv_format in FLOAT8 else qt.codes
    return codes, *(f[..., 0] for f in fields)


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    """Of the first three axes; a scale for all numbers has none."""
    return (0, 0, 0) if x is None or x.ndim < 3 else x.stride()[:3]


def _specimen(kind: str, kv_format: str, where: str, *, stored="", more="", latent=False) -> Specimen:
    """As it is launched for D = 128, or for a latent of 576. where: which of the ways to say it.

    stored: the cache's type if it is not that of the format. more: "scale" or "zero" beside the codes.
    """
    index = {"slots": ["Slots"], "lengths": ["Seqlens"], "table": ["Seqlens", "New", "Table"]}[where]
    code = stored or {"none": kind, "int8": "u8" if more == "zero" else "i8"}.get(kv_format, "u8")
    sides = "K" if latent else "KV"
    types = {x: f"*{kind}" for x in sides} | {f"{x}_cache": f"*{code}" for x in sides}
    fields = {"": [], "scale": ["scale"], "zero": ["scale", "zero"]}[more or "scale" * (kv_format[0] == "i")]
    types |= {f"{x}_{f}": "*fp16" for x in sides for f in fields} | {name: "*i32" for name in index}
    sizes = ("T", "S", "num_blocks", "block_size", "max_blocks")
    moves = [f"stride_{x}_{axis}" for x in ("kc", "vc") for axis in ("block", "token", "head")]
    moves += ["stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh"]
    scales = [f"stride_{x}_{axis}" for x in ("ks", "vs") for axis in ("block", "token", "head")]
    ints = {name: "i32" for name in (*sizes, *moves, *scales, "stride_tb")}
    pointers = ("V", "V_cache", "K_scale", "K_zero", "V_scale", "V_zero", "Slots", "Seqlens", "New", "Table")
    absent = {name: None for name in pointers if name not in types}
    widths = tiles(576, 1) if latent else tiles(128, 128)
    return Specimen(
        name=f"append.{kv_format}.{kind}.{where}" + f".{more}" * bool(more) + ".latent" * latent,
        fn="companion.kernels.append_kernel:append_kernel",
        signature=types | ints | {"k_unit": "fp32", "v_unit": "fp32"},
        constexprs=absent | widths | {"FORMAT": kv_format},
        aligned=(*types, *moves),
        expect=Expect(wide=0.4 if where == "table" else 0.5),  # lengths and block numbers are narrow
    )


SPECIMENS = [
    _specimen("fp16", "none", "slots"),
    _specimen("fp16", "none", "table"),
    _specimen("bf16", "none", "lengths"),
    _specimen("bf16", "none", "slots", latent=True),
    _specimen("fp32", "none", "slots", stored="bf16"),
    _specimen("bf16", "int8", "slots"),
    _specimen("fp16", "int8", "lengths", more="zero"),
    _specimen("bf16", "int4", "slots"),
    _specimen("fp16", "int4", "table", more="zero"),
    _specimen("bf16", "fp8_e4m3", "slots"),
    _specimen("bf16", "fp8_e5m2", "slots", more="scale"),
]
