"""Decode attention, stage one: a program takes the query rows of one key head over one split of the keys.

One body for every cache. What differs is constexpr: BLOCK_SIZE (paged), WINDOW, SOFTCAP, the format of the
cache (`tiles.py`), and whether products go to the tensor cores (DOT) or are multiplied and summed.

A split's result is normalized over its own keys and comes with its LSE; stage two joins them,
weighted by their LSEs; sinks enter there, once.
Sources: Dao et al. 2023, "Flash-Decoding"; Milakov and Gimelshein 2018 (online softmax).
"""

import triton
import triton.language as tl

from .tiles import by_channel, by_group, columns, load_tile, middle

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def locate(n, ok, b, TABLE, table_stride, BLOCK_SIZE: tl.constexpr):
    """Where token n of sequence b lies: (page, slot), int64 because a stride will multiply them."""
    if BLOCK_SIZE == 0:
        return b, n.to(tl.int64)
    else:
        page = tl.load(TABLE + b * table_stride + n // BLOCK_SIZE, mask=ok, other=0)
        return page.to(tl.int64), (n % BLOCK_SIZE).to(tl.int64)


@triton.jit
def rows_times_keys(q, k, DOT: tl.constexpr):
    """q (M, D), k (N, D) -> (M, N) float32."""
    if DOT:
        return tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        return tl.sum(q[:, None, :] * k[None, :, :], 2)


@triton.jit
def weights_times_values(p, v, DOT: tl.constexpr):
    """p (M, N) float32, v (N, D) -> (M, D) float32."""
    if DOT:
        return tl.dot(p.to(v.dtype), v, input_precision="ieee")
    else:
        return tl.sum(p[:, :, None] * v[None, :, :], 1)


@triton.jit
def decode_kernel(
    Q,  # (B, SQ, Hq, D)
    K,  # (B, S, Hkv, D), or paged (num_blocks, BLOCK_SIZE, Hkv, D); numbers or codes
    V,  # the same with DV channels; not read when LATENT
    K_SCALE,  # per token (B, S, Hkv); kivi: (B, S / K_GROUP, Hkv, D); paged: num_blocks, BLOCK_SIZE for B, S
    K_ZERO,  # like K_SCALE, strides included
    V_SCALE,  # per token (B, S, Hkv); kivi: (B, S, Hkv, DV / V_GROUP)
    V_ZERO,  # like V_SCALE, strides included
    SEQLENS,  # (B,) int32: keys of each sequence
    TAIL,  # (B,) int32: its tokens behind them, in another cache; read if HAS_TAIL
    TABLE,  # (B, blocks) int32; read if BLOCK_SIZE > 0
    OUT,  # (B, SQ, Hq, splits, DV) float32, or without splits the result itself
    LSE,  # (B, Hq, SQ, splits) float32, natural logarithm
    scale,  # float: on the scores, so that they become powers of 2; with SOFTCAP see `_factors`
    softcap,  # float
    left,  # int: keys that a query sees to its left; read if WINDOW
    split_size,  # int: keys of a split
    q_stride_b, q_stride_s, q_stride_h,
    k_stride_b, k_stride_s, k_stride_h,
    v_stride_b, v_stride_s, v_stride_h,
    k_scale_stride_b, k_scale_stride_s, k_scale_stride_h,
    v_scale_stride_b, v_scale_stride_s, v_scale_stride_h,
    table_stride,
    out_stride_b, out_stride_s, out_stride_h, out_stride_n,
    lse_stride_b, lse_stride_h, lse_stride_s, lse_stride_n,
    SQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KA: tl.constexpr, KB: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr,  # parts of a tile, `formats.py`
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_TAIL: tl.constexpr,
    LATENT: tl.constexpr, FORMAT: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, K_OFFSET: tl.constexpr, V_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = FORMAT == "int4" or FORMAT == "kivi4" or FORMAT == "kivi2"
    KIVI: tl.constexpr = FORMAT == "kivi4" or FORMAT == "kivi2"
    ROW_TILES: tl.constexpr = (SQ * GROUP + BLOCK_M - 1) // BLOCK_M
    b = tl.program_id(0).to(tl.int64)
    head_k = (tl.program_id(1) // ROW_TILES).to(tl.int64)
    split = tl.program_id(2)

    # The rows of a tile are all queries that read this key head: heads side by side, then draft tokens.
    r = tl.program_id(1) % ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    r_ok = r < SQ * GROUP
    query = (r // GROUP).to(tl.int64)
    head = head_k * GROUP + r % GROUP
    ka, kb = columns(KA, KB, PAIRS)
    q_rows = Q + b * q_stride_b + query * q_stride_s + head * q_stride_h
    qa = tl.load(q_rows[:, None] + ka[None, :], mask=r_ok[:, None] & (ka < D)[None, :], other=0.0)
    if WIDE:
        qa = qa.to(tl.float32)
    q_sum = tl.sum(qa.to(tl.float32), 1)
    if KB > 0:
        qb = tl.load(q_rows[:, None] + kb[None, :], mask=r_ok[:, None] & (kb < D)[None, :], other=0.0)
        qb = qb.to(qa.dtype)
        q_sum += tl.sum(qb.to(tl.float32), 1)

    # Queries are the last SQ tokens of their sequence; its first live key is the first query's.
    length = tl.load(SEQLENS + b)
    end = length
    if HAS_TAIL:
        end += tl.load(TAIL + b)
    position = end - SQ + r // GROUP
    first = 0
    if WINDOW:
        first = tl.maximum(end - SQ - left, 0)
    lo = first
    if KIVI:
        lo = first // BLOCK_N * BLOCK_N  # a tile lies within one group of tokens
    lo += split * split_size
    hi = tl.minimum(lo + split_size, length)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc_a = tl.zeros([BLOCK_M, VA], tl.float32)
    if VB > 0:
        acc_b = tl.zeros([BLOCK_M, VB], tl.float32)
    for n0 in range(lo, hi, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        n_ok = (n >= first) & (n < hi)
        page, slot = locate(n, n_ok, b, TABLE, table_stride, BLOCK_SIZE)

        # Scores, as powers of 2.
        k_rows = page * k_stride_b + slot * k_stride_s + head_k * k_stride_h
        k, k2 = load_tile(K, k_rows, n_ok, D, KA, KB, FORMAT)
        if KIVI:
            page0, slot0 = locate(n0 + tl.arange(0, 1), True, b, TABLE, table_stride, BLOCK_SIZE)
            row = page0 * k_scale_stride_b + slot0 // K_GROUP * k_scale_stride_s + head_k * k_scale_stride_h
            k, k2 = by_channel(k, k2, K_SCALE, K_ZERO, row, D)
        k = k.to(qa.dtype)
        s = rows_times_keys(qa, k, DOT)
        if KB > 0:
            s += rows_times_keys(qb, k2.to(qa.dtype), DOT)
        if K_SCALED:
            at = page * k_scale_stride_b + slot * k_scale_stride_s + head_k * k_scale_stride_h
            k_scale = tl.load(K_SCALE + at, mask=n_ok, other=0.0).to(tl.float32)
            s *= k_scale[None, :]
            if K_OFFSET:
                zero = tl.load(K_ZERO + at, mask=n_ok, other=0.0).to(tl.float32)
                s += q_sum[:, None] * (zero + middle(K, FORMAT) * k_scale)[None, :]
        s *= scale
        if SOFTCAP:
            s = softcap * (2 * tl.sigmoid(s) - 1)  # tanh, without a ratio that overflows
        seen = n_ok[None, :] & (n[None, :] <= position[:, None])
        if WINDOW:
            seen &= n[None, :] >= position[:, None] - left
        s = tl.where(seen, s, float("-inf"))

        # Online softmax. A row that has seen no key keeps m = -inf, and 0 stands in for it in the exponents.
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        m = m_new
        l = l * alpha + tl.sum(p, 1)
        acc_a *= alpha[:, None]
        if VB > 0:
            acc_b *= alpha[:, None]

        # Values. Their scales go into the weights, relative to the largest, which keeps float16 in range.
        if LATENT:
            v = k
            v2 = k
        else:
            v_rows = page * v_stride_b + slot * v_stride_s + head_k * v_stride_h
            v, v2 = load_tile(V, v_rows, n_ok, DV, VA, VB, FORMAT)
        at = page * v_scale_stride_b + slot * v_scale_stride_s + head_k * v_scale_stride_h
        if KIVI:
            v, v2 = by_group(v, v2, V_SCALE, V_ZERO, at, n_ok, DV, V_GROUP)
        unit = 1.0
        if V_SCALED:
            v_scale = tl.load(V_SCALE + at, mask=n_ok, other=0.0).to(tl.float32)
            if V_OFFSET:
                zero = tl.load(V_ZERO + at, mask=n_ok, other=0.0).to(tl.float32)
                shift = tl.sum(p * (zero + middle(V, FORMAT) * v_scale)[None, :], 1)
                acc_a += shift[:, None]
                if VB > 0:
                    acc_b += shift[:, None]
            unit = tl.max(v_scale, 0)
            p *= (v_scale / tl.where(unit > 0, unit, 1.0))[None, :]
        acc_a += weights_times_values(p, v.to(qa.dtype), DOT) * unit
        if VB > 0:
            acc_b += weights_times_values(p, v2.to(qa.dtype), DOT) * unit

    empty = l == 0.0
    total = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.log2(total)) * LN2)
    lse_rows = LSE + b * lse_stride_b + head * lse_stride_h + query * lse_stride_s + split * lse_stride_n
    tl.store(lse_rows, lse, mask=r_ok)
    if (lo < hi) | (split == 0):  # an empty split has only its LSE, but a sequence without keys has output 0
        va, vb = columns(VA, VB, PAIRS)
        norm = total[:, None]
        out = OUT + b * out_stride_b + query * out_stride_s + head * out_stride_h
        out += split.to(tl.int64) * out_stride_n
        ok = r_ok[:, None]
        out_type = OUT.dtype.element_ty
        tl.store(out[:, None] + va[None, :], (acc_a / norm).to(out_type), mask=ok & (va < DV)[None, :])
        if VB > 0:
            tl.store(out[:, None] + vb[None, :], (acc_b / norm).to(out_type), mask=ok & (vb < DV)[None, :])


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
