"""Where a decode step goes to a kernel instead of torch: Triton's on a GPU, Numba's on a CPU.
`companion.kernels.use` has the last word.

Every function returns None (or False) where torch should do it; then nothing has happened yet. A CPU user
never imports Triton through here, and Numba only after `use("compiled")`.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.cpu import run, wanted_on_cpu
from ..kernels.policy import wanted
from ..quantize import Codec

CPU_OPTIONS = {"softmax_scale", "softcap"}
MOST_QUERIES = 16  # tokens of a row that still count as decoding; a prompt's chunks are torch's


def decode(q, k_cache, v_cache, *, starts, stops, window, sinks, return_lse, table=None, **options):
    """q (B, Hq, S, D) over caches (B, n, Hkv, D), or pages with a table; None if torch should do it.

    Query i of row b stands at starts[b] + i and sees keys before stops[b].
    """
    S = q.shape[2]
    if not 0 < S <= MOST_QUERIES or not max(stops):
        return None
    if wanted_on_cpu(q, k_cache, v_cache, stops, window, table is not None) and (
        S == 1 and not options.keys() - CPU_OPTIONS and all(a + 1 == n for a, n in zip(starts, stops))
    ):
        out, lse = run(q[:, :, 0], k_cache, v_cache, stops, table, window=window, sinks=sinks, **options)
        return (out[:, :, None], lse[:, :, None]) if return_lse else out[:, :, None]
    if not wanted(q, k_cache, v_cache, sinks):
        return None
    from ..kernels import decode_attention

    if v_cache is not None and v_cache.data_ptr() == k_cache.data_ptr():  # a latent: values are its front
        options["head_dim_v"], v_cache = v_cache.shape[3], None
    ahead = [a + S - n for a, n in zip(starts, stops)]  # tokens that lie elsewhere, or padding
    if any(ahead):
        options["tail_seqlens"] = _int32(ahead, q.device)
    out, lse = decode_attention(
        _rows(q),
        k_cache,
        v_cache,
        _int32(stops, q.device),
        block_table=table,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        sinks=sinks,
        max_seqlen=max(stops),
        return_lse=True,
        **options,
    )
    out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def pages_of_one(store: Tensor) -> Tensor:
    """A store (B, H, n, D) as pages of one token, (pages, 1, H, D): slot s of row b is page b * H * n + s."""
    B, H, n, D = store.shape
    return store.as_strided((B * H * n - (H - 1) * n, 1, H, D), (D, D, n * D, 1))


def kernel_format(k: Codec, v: Codec, widths: tuple[int, int]) -> str | None:
    """The kernels' name for caches of these codecs and head widths, or None if they have none."""
    if k.name != v.name or k.bits > 8 or k.name in ("nvfp4", "mxfp4"):
        return None
    per_token = all(c.group_dim == -1 and c.group in (None, w) for c, w in zip((k, v), widths))
    if k.name.startswith("fp8"):  # no scale, one for all, or one per token
        scales = {(c.group is None, c.fixed is None) for c in (k, v)}
        return k.name if per_token and len(scales) == 1 and (False, False) not in scales else None
    if per_token and k.name != "int2":
        return k.name
    groups = all(c.group in (16, 32, 64, 128) and not c.symmetric for c in (k, v))
    kivi = groups and (k.group_dim, v.group_dim) == (-2, -1) and k.name != "int8"
    return f"kivi{k.bits}" if kivi else None


def decode_packed_part(q, store, *, starts, stops, window, softmax_scale, softcap):
    """(out, lse) of q over the first stops[b] tokens of a layer's packed part (a `TailedLayer`), or None."""
    widths = store.k.width, store.v.width
    kv_format = kernel_format(store.k.codec, store.v.codec, widths)
    if kv_format is None:
        return None
    caches, fields = [], {}
    for name, packed in (("k", store.k), ("v", store.v)):
        views = {field: packed.kernel_view(field) for field in packed.fields}
        caches.append(views.pop("codes"))
        per_token = not kv_format.startswith("kivi")
        fields |= {f"{name}_{field}": x[..., 0] if per_token else x for field, x in views.items()}
        if packed.whole is not None:
            fields[f"{name}_scale"] = packed.codec.fixed
    return decode(
        q, *caches, starts=starts, stops=stops, window=window, sinks=None, return_lse=True,
        table=store.k.table(), softmax_scale=softmax_scale, softcap=softcap, kv_format=kv_format, **fields,
    )  # fmt: skip


def write(k, v, k_cache, v_cache, *, slots=None, before=None, counts=None) -> bool:
    """New tokens (B, Hkv, S, D) into caches in the kernels' layout; False if torch should do it. v: or None.

    slots: for pages, those of a row's real tokens, or a tensor (B, S) with all; or before and counts: tokens
    that a row had, and gets.
    """
    if not wanted(k, v, k_cache, v_cache):
        return False
    from ..kernels.append import append

    if slots is not None:
        if not isinstance(slots, Tensor):
            padded = tuple((*row, *[-1] * (k.shape[2] - len(row))) for row in slots)
            slots = _copied(padded, torch.int64, k.device)
        places = {"slot_mapping": slots}
    else:
        ends = [b + n for b, n in zip(before, counts)]
        names = {"cache_seqlens": ends, "new_tokens": counts}
        places = {name: _int32(n, k.device) for name, n in names.items()}
    append(_rows(k), None if v is None else _rows(v), k_cache, v_cache, **places)
    return True


def _int32(values: Sequence[int], device: torch.device) -> Tensor:
    return _copied(tuple(values), torch.int32, device)


@functools.lru_cache(maxsize=8)
def _copied(values: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the device, once for all layers of a step: every copy from the host waits for it."""
    return torch.tensor(values, dtype=dtype, device=device)


def _rows(x: Tensor) -> Tensor:
    """(B, H, S, D) as (B, S, H, D), with channels side by side."""
    x = x.transpose(1, 2)
    return x if x.stride(3) == 1 else x.contiguous()
