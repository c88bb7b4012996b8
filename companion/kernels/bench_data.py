"""Tensors for the cases of `companion bench --gpu`, and what they mean in float64.

Codes and scales are drawn at random: a kernel is tested against the numbers that its cache stands for, the
quantizer apart.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import sdpa
from ..quantize import unpack
from .bench_cases import KIVI_GROUP, DecodeCase, MoECase
from .bench_report import BEYOND

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
TOLERANCE = {"fp32": 5e-6, "fp16": 1e-3, "bf16": 8e-3}  # relative Frobenius error


def decode_inputs(case: DecodeCase, device: torch.device, seed: int = 0) -> dict:
    """Arguments of `decode_attention` by name: q, k_cache, v_cache, cache_seqlens and the options."""
    g = torch.Generator(device).manual_seed(seed)
    h, B, n = case.heads, case.batch, case.length
    to = {"generator": g, "device": device}
    shape = (B, n)
    out = {
        "cache_seqlens": torch.full((B,), n, dtype=torch.int32, device=device),
        "kv_format": case.kv_format,
    }
    if case.paged:
        blocks = -(-n // case.block_size)
        shape = (B * blocks, case.block_size)
        out["block_table"] = torch.randperm(B * blocks, **to).view(B, blocks).int()
    out["q"] = torch.randn(B, h.heads, h.head_dim, dtype=DTYPES[case.dtype], **to)
    for side, width in (("k", h.head_dim), ("v", h.v_head_dim)):
        if side == "v" and h.latent:
            out |= {"v_cache": None, "head_dim_v": width}
            continue
        codes, fields = _stored(case, (*shape, h.kv_heads, width), side, to)
        out |= {f"{side}_cache": codes} | {f"{side}_{name}": x for name, x in fields.items()}
    return out


def _stored(
    case: DecodeCase, shape: tuple[int, ...], side: str, to: dict
) -> tuple[Tensor, dict[str, Tensor]]:
    """A cache of this shape in the case's format, with its scale and zero."""
    *lead, D = shape
    if case.kv_format == "none":
        return torch.randn(shape, dtype=DTYPES[case.dtype], **to), {}
    if case.kv_format in FLOAT8:
        return torch.randn(shape, **to).to(FLOAT8[case.kv_format]).view(torch.uint8), {}
    if case.kv_format == "int8":
        scale = torch.rand(lead, **to).add_(0.5).mul_(0.02).half()
        return torch.randint(-127, 128, shape, dtype=torch.int8, **to), {"scale": scale}
    pages, tokens, heads = lead
    groups = tuple(lead)
    if case.kv_format == "kivi4":
        per_channel, per_group = (pages, tokens // KIVI_GROUP, heads, D), (*lead, D // KIVI_GROUP)
        groups = per_channel if side == "k" else per_group
    scale = torch.rand(groups, **to).add_(0.5).mul_(0.3).half()
    codes = torch.randint(0, 256, (*lead, D // 2), dtype=torch.uint8, **to)
    return codes, {"scale": scale, "zero": scale * -7.5}


def decode_reference(case: DecodeCase, inputs: dict, row: int) -> tuple[Tensor, Tensor]:
    """out (Hq, Dv) and LSE (Hq,) of one sequence in float64, from the numbers that the cache stands for."""
    k = _row(case, inputs, row, "k")
    v = k[..., : case.heads.v_head_dim] if case.heads.latent else _row(case, inputs, row, "v")
    q = inputs["q"][row, None, :, None].double()  # (1, Hq, 1, D)
    out, lse = sdpa(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], return_lse=True)
    return out[0, :, 0], lse[0, :, 0]


def _row(case: DecodeCase, inputs: dict, row: int, side: str) -> Tensor:
    """One sequence's keys or values, (n, Hkv, D) float64."""

    def of_row(x):  # (tokens or groups of them, Hkv, ...)
        if "block_table" not in inputs:
            return x[row]
        return x[inputs["block_table"][row].long()].flatten(0, 1)

    x = of_row(inputs[f"{side}_cache"])
    if case.kv_format == "none":
        return x[: case.length].double()
    if case.kv_format in FLOAT8:
        return x[: case.length].view(FLOAT8[case.kv_format]).float().double()
    scale = of_row(inputs[f"{side}_scale"]).double()
    zero = of_row(inputs[f"{side}_zero"]).double() if f"{side}_zero" in inputs else torch.zeros_like(scale)
    codes = (x if case.kv_format == "int8" else unpack(x, 4)).double()
    if case.kv_format == "kivi4":
        dim, each = (0, KIVI_GROUP) if side == "k" else (2, KIVI_GROUP)
        scale, zero = (s.repeat_interleave(each, dim=dim) for s in (scale, zero))
    else:
        scale, zero = scale[..., None], zero[..., None]
    return (codes * scale + zero)[: case.length]


def moe_inputs(case: MoECase, device: torch.device) -> tuple[Tensor, ...]:
    """x, w1, w2, weights, ids of a layer: every token to top_k experts at random."""
    g = torch.Generator(device).manual_seed(4)
    E, K, N, to = case.experts, case.d_model, case.ffn, {"generator": g, "device": device}
    x = torch.randn(case.tokens, K, **to).to(DTYPES[case.dtype])
    w1, w2 = (
        torch.randn(shape, dtype=DTYPES[case.dtype], **to).mul_(shape[-1] ** -0.5)
        for shape in ((E, 2 * N, K), (E, K, N))
    )
    ids = torch.rand(case.tokens, E, **to).topk(case.top_k).indices
    weights = torch.rand(case.tokens, case.top_k, **to).softmax(-1)
    return x, w1, w2, weights, ids


def moe_reference(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A layer's result for a few tokens in float64, a choice a time: all experts in float64 would not fit."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for t, row in enumerate(ids.tolist()):
        for j, e in enumerate(row):
            gate, up = (w1[e].double() @ x[t].double()).chunk(2)
            out[t] += weights[t, j].double() * (w2[e].double() @ (F.silu(gate) * up))
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error; infinite where NaN or infinity stand in one of the two alone."""
    got, want = got.double().cpu(), want.double().cpu()
    strange = got.isnan() != want.isnan()
    strange |= (got.isinf() | want.isinf()) & (got != want)
    if got.shape != want.shape or strange.any():
        return float("inf")
    live = want.isfinite()
    return float((got[live] - want[live]).norm() / want[live].norm().clamp_min(1e-30))


def judge(row: dict, error: float, tolerance: float) -> None:
    """Note the error, and whether it will do."""
    error = error if math.isfinite(error) else BEYOND
    row |= {"error": error, "tolerance": tolerance, "ok": error <= tolerance}
