"""What `companion bench --gpu` checks first: each kernel on small, hostile inputs.

Against float64, or bit for bit. The timed cases are checked again, at their own size.
"""

import importlib.util
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ...attention import sdpa
from ...formats import INT4
from .. import decode_attention, fused_moe, grouped_gemm
from ..append import append
from ..append.reference import append_reference
from ..copy import copy
from ..moe.plan import FORMS
from ..moe.reference import fused_moe_reference, grouped_gemm_reference
from .cases import DTYPES, FLOAT8, TOLERANCE, DecodeCase, MoECase, moe_inputs, relative_error


def checks(bench) -> None:
    """All of them, each by name."""
    x = torch.randint(256, (100_003,), dtype=torch.uint8, device=bench.device)
    bench.check("copy, bit for bit", 0.0, lambda: different(copy(x), x))
    for kv_format in ("none", "int8", INT4.kernel, *FLOAT8):
        bench.check(f"append {kv_format}, byte for byte", 0.0, lambda f=kv_format: _append_differs(bench, f))
    for dtype in dict.fromkeys((bench.dtype, bench.other, "fp32")):
        if dtype:
            for name, options in FEATURES.items():
                error = lambda d=dtype, o=options: _feature_error(bench, d, **o)  # noqa: E731
                bench.check(f"decode_attention {dtype}: {name}", TOLERANCE[dtype], error)
    for dtype in dict.fromkeys((bench.dtype, "fp32")):
        for form in FORMS:
            for kernel, name in ((_gemm_error, "grouped_gemm"), (_moe_error, "fused_moe")):
                error = lambda k=kernel, d=dtype, f=form: k(bench, d, f)  # noqa: E731
                bench.check(f"{name} {dtype}, {form}", TOLERANCE[dtype], error)


FEATURES = {
    "lengths from 0, NaN in unused slots, junk in the table": dict(paged=True),
    "a window, softcap and sinks": dict(window=40, softcap=20.0, sinks=True),
    "four tokens at once": dict(queries=4),
}


def _feature_error(bench, dtype, *, paged=False, window=None, softcap=0.0, sinks=False, queries=1) -> float:
    """6 heads over 2 of width 96, lengths around the edges of a page: output and LSE, the larger error."""
    g, size = torch.Generator().manual_seed(1), 16
    lengths = [0, 1, 15, 17, 70] if queries == 1 else [4, 5, 15, 17, 70]
    B, n = len(lengths), 80
    q = torch.randn(B, queries, 6, 96, generator=g).to(DTYPES[dtype])
    k, v = (torch.randn(B, n, 2, 96, generator=g).to(DTYPES[dtype]) for _ in "kv")
    sink = torch.randn(6, generator=g) if sinks else None
    want = [
        sdpa(
            *(t.transpose(0, 1)[None].double() for t in (q[b], k[b, :m], v[b, :m])),
            causal=True,
            window_size=(-1 if window is None else window - 1, 0),
            softcap=softcap,
            sinks=None if sink is None else sink.double(),
            return_lse=True,
        )
        for b, m in enumerate(lengths)
    ]
    for b, m in enumerate(lengths):
        k[b, m:], v[b, m:] = math.nan, math.nan
    options = dict(softcap=softcap, sinks=None if sink is None else sink.to(bench.device))
    if window is not None:
        options["window_size"] = (window - 1, 0)
    if paged:
        order = torch.randperm(B * n // size, generator=g)
        k, v = (t.view(-1, size, 2, 96)[order.argsort()] for t in (k, v))  # page i lies where order says
        table = order.view(B, -1).int()
        for b, m in enumerate(lengths):
            table[b, -(-m // size) :] = 2147480000
        options["block_table"] = table.to(bench.device)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    tensors = (t.to(bench.device) for t in (q, k, v, seqlens))
    out, lse = decode_attention(*tensors, return_lse=True, **options)
    outs, lses = (torch.cat(x) for x in zip(*want))
    return max(relative_error(out.transpose(1, 2), outs), relative_error(lse, lses))


def _append_differs(bench, kv_format) -> float:
    """Share of bytes that differ from the reference's on the CPU, over slots of which some are skipped."""
    g = torch.Generator().manual_seed(2)
    T, Hkv, D = 64, 2, 80
    x = torch.randn(T, Hkv, D, generator=g) * torch.exp(4 * torch.randn(T, Hkv, 1, generator=g))
    x = x.to(DTYPES[bench.dtype])
    slots = torch.randperm(96, generator=g)[:T]
    slots[::7] = -1
    dtype = {"none": x.dtype, "int8": torch.int8}.get(kv_format, torch.uint8)
    cache = torch.zeros(6, 16, Hkv, D // 2 if kv_format == INT4.kernel else D, dtype=dtype)
    stored = [cache]
    if kv_format.startswith("int"):
        stored += [
            torch.zeros(6, 16, Hkv, dtype=torch.float16) for _ in range(1 + (kv_format == INT4.kernel))
        ]
    runs = []
    for write, device in ((append, bench.device), (append_reference, torch.device("cpu"))):
        mine = [t.clone().to(device) for t in stored]
        fields = dict(zip(("k_scale", "k_zero"), mine[1:]))
        write(x.to(device), None, mine[0], None, slot_mapping=slots.to(device), kv_format=kv_format, **fields)
        runs.append(mine)
    return max(different(a, b) for a, b in zip(*runs))


def different(a, b) -> float:
    return float((a.cpu().view(torch.uint8) != b.cpu().view(torch.uint8)).double().mean())


def _gemm_error(bench, dtype, form) -> float:
    g = torch.Generator().manual_seed(3)
    offsets = torch.tensor([0, 1, 1, 20, 37, 37])
    x, w = torch.randn(37, 96, generator=g), torch.randn(5, 80, 96, generator=g)
    x, w = x.to(DTYPES[dtype]), w.to(DTYPES[dtype])
    got = grouped_gemm(*(t.to(bench.device) for t in (x, w, offsets)), form=form)
    return relative_error(got, grouped_gemm_reference(x.double(), w.double(), offsets))


def _moe_error(bench, dtype, form) -> float:
    case = MoECase("small", 6, 2, 96, 80, 13, dtype)
    x, w1, w2, weights, ids = moe_inputs(case, torch.device("cpu"))
    ids[3], ids[5, 1] = -1, -1
    got = fused_moe(*(t.to(bench.device) for t in (x, w1, w2, weights, ids)), form=form)
    return relative_error(got, fused_moe_reference(*(t.double() for t in (x, w1, w2, weights)), ids))


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
