"""What `append` does, in torch: the slot of each token, and the codecs of `companion.quantize`."""

import torch
from jaxtyping import Int
from torch import Tensor

from ...quantize import codec
from ...quantize.codec import LIMIT
from . import FLOAT8


def append_reference(
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
    """The slot of each of S new tokens a row, int64 (B, S); -1 where it has none. The reference of `_place`.

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
