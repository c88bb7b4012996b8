"""What the decode kernel is timed beside: torch's attention, and other people's kernels where installed.

A baseline gets its own best layout, made before the clock runs. Whatever goes wrong in one is written beside
the others' numbers and stops nothing.
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .bench_cases import DecodeCase

PAGE = 16


def baselines(case: DecodeCase, inputs: dict, *, slow: bool) -> dict[str, Callable[[], Callable]]:
    """Name -> a function that prepares and returns the call to time. For contiguous caches of plain numbers.

    slow: also those that may compile for a minute when first used.
    """
    found = {}
    if not case.heads.latent:
        found["sdpa"] = lambda: _sdpa(inputs)
    found["sdpa, rows packed"] = lambda: _packed(inputs)
    if not case.heads.latent and case.dtype != "fp32":
        if importlib.util.find_spec("flash_attn"):
            found["flash-attn"] = lambda: _flash_attn(inputs)
        if slow and importlib.util.find_spec("flashinfer"):
            found["flashinfer"] = lambda: _flashinfer(inputs)
    return found


def _sdpa(inputs):
    """torch's own, as it is usually called: one query per head, grouped heads."""
    q = inputs["q"][:, :, None]
    k, v = (inputs[f"{x}_cache"].transpose(1, 2).contiguous() for x in "kv")
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _packed(inputs):
    """The heads that share a key head as so many query rows; of a latent, all of them."""
    q, k = inputs["q"], inputs["k_cache"].transpose(1, 2).contiguous()
    v = inputs["v_cache"]
    v = k[..., : inputs["head_dim_v"]] if v is None else v.transpose(1, 2).contiguous()
    rows = q.view(q.shape[0], k.shape[1], -1, q.shape[2])
    return lambda: F.scaled_dot_product_attention(rows, k, v)


def _flash_attn(inputs):
    from flash_attn import flash_attn_with_kvcache

    q = inputs["q"][:, None]
    args = inputs["k_cache"], inputs["v_cache"]
    return lambda: flash_attn_with_kvcache(q, *args, cache_seqlens=inputs["cache_seqlens"])


def _flashinfer(inputs):
    """Its batch decode over pages, which lie in order here."""
    import flashinfer

    q, k = inputs["q"], inputs["k_cache"]
    B, n, Hkv, D = k.shape
    pages = tuple(inputs[f"{x}_cache"].view(B * n // PAGE, PAGE, Hkv, D) for x in "kv")
    ids = torch.arange(B * n // PAGE, dtype=torch.int32, device=q.device)
    starts = torch.arange(B + 1, dtype=torch.int32, device=q.device) * (n // PAGE)
    last = torch.full((B,), PAGE, dtype=torch.int32, device=q.device)
    room = torch.zeros(128 * 2**20, dtype=torch.uint8, device=q.device)
    grouped = q.shape[1] // Hkv >= 4
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=grouped)
    types = {"data_type": q.dtype, "q_data_type": q.dtype}
    wrapper.plan(starts, ids, last, q.shape[1], Hkv, D, PAGE, **types)
    return lambda: wrapper.run(q, pages)
