"""The two kernels of a mixture of experts: many small products as one launch, and the sum of a token's rows.

Rows come sorted by expert. A program makes one tile of the output, BLOCK_M rows by BLOCK_N columns, and is
told its first row and one past its last. It walks over the experts in between: one where tiles begin with an
expert ("padded"), several where they do not ("straddle"). Rows of another expert are masked, loads included:
nothing of them, not even a NaN, reaches this one.

"""

import triton
import triton.language as tl


@triton.jit
def grouped_kernel(
    X,  # (.., K)
    W,  # (E, N, K); if GATED (E, 2 N, K), gate rows before up rows
    BIAS,  # (E, N) or (E, 2 N)
    OUT,  # (.., N)
    ORDER,  # (S,) int32: the slot, token * TOP_K + choice, of each sorted row
    SCALE,  # (T * TOP_K,) float32: the weight of each slot
    EXPERT,  # (S,) int32: the expert of each sorted row
    OFFSETS,  # (E + 1,) int32: expert e has the sorted rows OFFSETS[e] to OFFSETS[e + 1]
    TILES,  # (tiles, 2) int32: first row, and one past the last
    N,
    K,
    stride_xm,
    stride_we,
    stride_wn,
    stride_up,  # from the gate row of W to the up row, N * stride_wn
    stride_be,
    stride_om,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,  # read token ORDER[row] // TOP_K of X for each row, else row
    SCATTER: tl.constexpr,  # write to slot ORDER[row] of OUT, times its weight, else to row
    GATED: tl.constexpr,  # gate * sigmoid(alpha * gate) * up
    CLAMP: tl.constexpr,  # gpt-oss: gate at most limit, up within it, up + 1
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in float32: bfloat16 in the interpreter
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.load(TILES + 2 * tl.program_id(0))
    end = tl.load(TILES + 2 * tl.program_id(0) + 1)
    rows = row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    k = tl.arange(0, BLOCK_K)
    n_ok = n < N
    source = rows.to(tl.int64)  # the rows of X
    if GATHER:
        source = tl.load(ORDER + rows, mask=rows < end, other=0).to(tl.int64) // TOP_K

    while row < end:  # an expert a turn
        e = tl.load(EXPERT + row).to(tl.int64)
        stop = tl.minimum(tl.load(OFFSETS + e + 1), end)
        mine = (rows >= row) & (rows < stop)
        x_at = X + source[:, None] * stride_xm + k[None, :]  # [BLOCK_M, BLOCK_K]
        w_at = W + e * stride_we + n[None, :].to(tl.int64) * stride_wn + k[:, None]  # [BLOCK_K, BLOCK_N]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in range(0, K, BLOCK_K):
            k_ok = k < K - k0
            x = tl.load(x_at + k0, mask=mine[:, None] & k_ok[None, :], other=0.0)
            w = tl.load(w_at + k0, mask=k_ok[:, None] & n_ok[None, :], other=0.0)
            if UPCAST:
                x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, w, acc, input_precision="ieee")
            if GATED:
                w = tl.load(w_at + stride_up + k0, mask=k_ok[:, None] & n_ok[None, :], other=0.0)
                up = tl.dot(x, w.to(x.dtype), up, input_precision="ieee")

        if HAS_BIAS:
            b_at = BIAS + e * stride_be + n
            acc += tl.load(b_at, mask=n_ok, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(b_at + N, mask=n_ok, other=0.0).to(tl.float32)[None, :]
        if CLAMP:
            acc = tl.minimum(acc, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        if GATED:
            acc = acc * tl.sigmoid(alpha * acc) * up
        target = rows.to(tl.int64)  # the rows of OUT
        if SCATTER:
            target = tl.load(ORDER + rows, mask=mine, other=0).to(tl.int64)
            acc *= tl.load(SCALE + target, mask=mine, other=0.0)[:, None]
        out_at = OUT + target[:, None] * stride_om + n[None, :]
        tl.store(out_at, acc.to(OUT.dtype.element_ty), mask=mine[:, None] & n_ok[None, :])
        row = stop


@triton.jit
def combine_kernel(
    Y,  # (T * TOP_K, D) float32, weighted rows in the order of slots
    SENT,  # (T * TOP_K,) int8, 0 for a slot that has no row: its place in Y was never written
    OUT,  # (T, D)
    T,
    D,
    stride_ym,
    stride_om,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (t < T)[:, None] & (d < D)[None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for j in range(TOP_K):  # always in the order of choices: nothing is added atomically
        slot = t.to(tl.int64) * TOP_K + j
        sent = tl.load(SENT + slot, mask=t < T, other=0) != 0
        acc += tl.load(Y + slot[:, None] * stride_ym + d[None, :], mask=inside & sent[:, None], other=0.0)
    out_at = OUT + t.to(tl.int64)[:, None] * stride_om + d[None, :]
    tl.store(out_at, acc.to(OUT.dtype.element_ty), mask=inside)
