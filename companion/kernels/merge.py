"""Decode attention, stage two: join what the splits found, weighted by their LSEs; sinks enter here, once.

Reference: `companion.attention.merge_partials`.
"""

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    PARTS,  # (B, SQ, Hq, splits, DV) float32, each normalized over its own keys
    PART_LSE,  # (B, Hq, SQ, splits) float32, natural logarithm; -inf: no keys, and its part may hold anything
    SINKS,  # (Hq,) float32; read if HAS_SINKS
    OUT,  # (B, SQ, Hq, DV)
    LSE,  # (B, Hq, SQ) float32, without the sinks
    splits,
    heads,
    parts_stride_b, parts_stride_s, parts_stride_h, parts_stride_n,
    part_lse_stride_b, part_lse_stride_h, part_lse_stride_s, part_lse_stride_n,
    out_stride_b, out_stride_s, out_stride_h,
    lse_stride_b, lse_stride_h, lse_stride_s,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    query = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    parts = PARTS + b * parts_stride_b + query * parts_stride_s + head * parts_stride_h
    part_lse = PART_LSE + b * part_lse_stride_b + head * part_lse_stride_h + query * part_lse_stride_s

    # Tiles of BLOCK_S splits whatever their number, so that more empty ones change no bit of a result.
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for s0 in range(0, splits, BLOCK_S):
        s = (s0 + tl.arange(0, BLOCK_S)).to(tl.int64)
        lse = tl.load(part_lse + s * part_lse_stride_n, mask=s < splits, other=float("-inf"))
        full = lse > float("-inf")
        at = (s * parts_stride_n)[:, None] + d[None, :]
        part = tl.load(parts + at, mask=full[:, None] & (d < DV)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp(lse - base)
        alpha = tl.exp(m - base)
        acc = acc * alpha + tl.sum(weight[:, None] * part, 0)
        l = l * alpha + tl.sum(weight, 0)
        m = m_new

    empty = l == 0.0
    total = tl.where(empty, 1.0, l)
    tl.store(
        LSE + b * lse_stride_b + head * lse_stride_h + query * lse_stride_s,
        tl.where(empty, float("-inf"), m + tl.log(total)),
    )
    if HAS_SINKS:
        sink = tl.load(SINKS + head)
        top = tl.maximum(m, sink)
        base = tl.where(top == float("-inf"), 0.0, top)
        keys = tl.exp(m - base)
        acc *= keys
        total = l * keys + tl.exp(sink - base)
        total = tl.where(total == 0.0, 1.0, total)
    out = OUT + b * out_stride_b + query * out_stride_s + head * out_stride_h
    tl.store(out + d, (acc / total).to(OUT.dtype.element_ty), mask=d < DV)
