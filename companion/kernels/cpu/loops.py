"""What a decode step does to a few rows besides attention, for a CPU, compiled by Numba.

A product of a few rows takes as long as reading the matrix, if nothing else is in the way. A library cuts the
matrix into blocks, which pays when many rows use them; here a thread goes along its part of the matrix as it
lies, one output after the other, and the processor fetches ahead. What stands between the products is small
arithmetic, of which torch makes a dozen calls and these loops one. `step` puts all of it together: one token
of every row through all layers of a plain decoder, with nothing of Python between the layers. By torch a step
is some forty calls in every layer, and each finds the caches emptied by the weights that were just read.
"""

import math

import numpy as np
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic

from .attention import LOOP, TILE, compiled, compiled_for_threads, decode, f32

LEAST_WEIGHTS = 2**14  # of a part: waking a thread costs more than reading fewer


@njit
def parts_of(w, threads):
    """In how many parts to multiply with a matrix."""
    return max(1, min(threads, w.size // LEAST_WEIGHTS))


@njit(**LOOP)
def multiply(x, w, scale, begin, end, y):
    """y[r, o] = x[r] . w[o] for the outputs begin .. end - 1; x (R, K), w (O, K), y (R, O).

    A row of w comes from memory once and serves all rows of x, two at a time. w: float32, or int8 codes with
    a scale (O,) for each output; scale is empty otherwise.
    """
    R, K = x.shape
    for o in range(begin, end):
        weights, factor = w[o], f32(1)
        if len(scale):
            factor = scale[o]
        for r in range(0, R - 1, 2):
            a, b = x[r], x[r + 1]
            sa = sb = f32(0)
            for i in range(K):
                weight = f32(weights[i])
                sa += a[i] * weight
                sb += b[i] * weight
            y[r, o], y[r + 1, o] = sa * factor, sb * factor
        if R % 2:
            a, sa = x[R - 1], f32(0)
            for i in range(K):
                sa += a[i] * f32(weights[i])
            y[R - 1, o] = sa * factor


@compiled_for_threads
def linear(x, w, scale, threads, y):
    """Fill y (R, O) with x (R, K) times the rows of w (O, K), the outputs cut between threads."""
    O, parts = len(w), parts_of(w, threads)
    for p in prange(parts):
        multiply(x, w, scale, O * p // parts, O * (p + 1) // parts, y)


@compiled_for_threads
def gated(x, gate_up, gate_up_scale, down, down_scale, gelu, threads, h, y):
    """Fill y (R, K) with down . (act(gate . x) * (up . x)); act is SiLU, or GELU by its tanh form.

    gate_up (2 F, K), down (K, F), their scales as for `multiply`. h (2, R, F): room for what lies between.
    """
    F, O, parts = down.shape[1], len(down), parts_of(gate_up, threads)
    gate_scale, up_scale = gate_up_scale[:F], gate_up_scale[F:]  # empty ones stay empty
    for p in prange(parts):
        begin, end = F * p // parts, F * (p + 1) // parts
        multiply(x, gate_up[:F], gate_scale, begin, end, h[0])
        multiply(x, gate_up[F:], up_scale, begin, end, h[1])
        for r in range(len(x)):
            gate, up = h[0, r], h[1, r]
            for j in range(begin, end):
                g = gate[j]
                if gelu:
                    inner = f32(0.7978845608028654) * (g + f32(0.044715) * g * g * g)
                    act = f32(0.5) * g * (f32(1) + math.tanh(inner))
                else:
                    act = g / (f32(1) + math.exp(-g))
                gate[j] = act * up[j]
    parts = parts_of(down, threads)
    for p in prange(parts):
        multiply(h[0], down, down_scale, O * p // parts, O * (p + 1) // parts, y)


@njit(**LOOP)
def rms_norm(x, weight, eps, y):
    """Fill y (R, K), which may be x, with x / rms(x) * weight."""
    for r in range(len(x)):
        row, out = x[r], y[r]
        squares = f32(0)
        for i in range(len(row)):
            squares += row[i] * row[i]
        scale = f32(1) / np.sqrt(squares / f32(len(row)) + eps)
        for i in range(len(row)):
            out[i] = row[i] * scale * weight[i]


@njit(**LOOP)
def apply_rope(x, cos, sin):
    """Turn pairs (i, i + half) of x (B, H, D), in place, by the angles of cos and sin (B or 1, half)."""
    half = cos.shape[1]
    for b in range(len(x)):
        c, s = cos[b % len(cos)], sin[b % len(cos)]
        for h in range(x.shape[1]):
            row = x[b, h]
            for i in range(half):
                p, q = row[i], row[i + half]
                row[i] = p * c[i] - q * s[i]
                row[i + half] = q * c[i] + p * s[i]


@intrinsic
def pointer(typing_context, number):
    """An address as a pointer, which `carray` needs."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@njit
def vector(address, n):
    return carray(pointer(address), (n,), np.float32)


@njit
def matrix(address, rows, columns, like):
    return carray(pointer(address), (rows, columns), like.dtype)


@njit
def remember(qkv, kv_heads, at, k, v, k_strides, v_strides, table, size):
    """Write each row's new keys and values, the last heads of qkv (B, Hq + 2 Hkv, D), behind `at` tokens."""
    B, heads, D = qkv.shape
    for b in range(B):
        page, slot = np.int64(table[b, at[b] // size]), at[b] % size
        for h in range(kv_heads):
            k_at = page * k_strides[0] + slot * k_strides[1] + h * k_strides[2]
            v_at = page * v_strides[0] + slot * v_strides[1] + h * v_strides[2]
            k[k_at : k_at + D] = qkv[b, heads - 2 * kv_heads + h]
            v[v_at : v_at + D] = qkv[b, heads - kv_heads + h]


@compiled
def step(
    x, layers, like, spec, cos, sin, k_strides, v_strides, k_span, v_span, table, size, before,
    threads, least_tiles,
):  # fmt: skip
    """Bring x (B, d) through all layers, in place; every row's new key and value go into its store.

    layers (L,) and spec: records, as `cpu_rows` makes them. like: anything of the matrices' type, float32 or
    int8. cos, sin (B or 1, half). k_strides, v_strides, table, size: as for `decode`; the layers' stores are
    alike, of k_span and v_span numbers. before (B,): tokens that each row had.
    """
    B, d = x.shape
    heads, kv_heads, D, ffn = spec.heads, spec.kv_heads, spec.head_dim, spec.ffn
    group, both = heads // kv_heads, heads + kv_heads
    normed, added = np.empty_like(x), np.empty_like(x)
    qkv = np.empty((B, both + kv_heads, D), f32)
    flat = qkv.reshape(B, -1)
    q, out = np.empty((B * kv_heads, group, D), f32), np.empty((B * kv_heads, group, D), f32)
    lse, no_sinks = np.empty((B * kv_heads, group), f32), np.empty((0, 0), f32)
    hidden = np.empty((2, B, ffn), f32)
    first, stops = np.zeros(B, np.int64), before + 1
    scaled = like.itemsize == 1  # else scales are empty
    for i in range(len(layers)):
        w = layers[i]
        rms_norm(x, vector(w.attention_norm, d), spec.eps, normed)
        wide = flat.shape[1]
        linear(normed, matrix(w.qkv, wide, d, like), vector(w.qkv_scale, wide * scaled), threads, flat)
        if w.qkv_bias:
            flat += vector(w.qkv_bias, wide)
        for b in range(B):
            if w.q_norm:
                rms_norm(qkv[b, :heads], vector(w.q_norm, D), spec.eps, qkv[b, :heads])
                rms_norm(qkv[b, heads:both], vector(w.k_norm, D), spec.eps, qkv[b, heads:both])
        apply_rope(qkv[:, :both], cos, sin)
        k, v = vector(w.k, k_span), vector(w.v, v_span)
        remember(qkv, kv_heads, before, k, v, k_strides, v_strides, table, size)
        tiles = 0
        for b in range(B):
            q[b * kv_heads : (b + 1) * kv_heads] = qkv[b, :heads].reshape(kv_heads, group, D)
            first[b] = max(0, stops[b] - w.window) if w.window else 0
            tiles += (stops[b] - first[b]) * kv_heads // TILE
        parts = max(1, min(threads, tiles // least_tiles))
        decode(
            q, k, v, k_strides, v_strides, table, size, first, stops, parts,
            spec.scale, 0.0, no_sinks, out, lse,
        )  # fmt: skip
        rows, scale = out.reshape(B, heads * D), vector(w.o_scale, d * scaled)
        linear(rows, matrix(w.o, d, heads * D, like), scale, threads, added)
        x += added
        rms_norm(x, vector(w.ffn_norm, d), spec.eps, normed)
        gated(
            normed, matrix(w.gate_up, 2 * ffn, d, like), vector(w.gate_up_scale, 2 * ffn * scaled),
            matrix(w.down, d, ffn, like), vector(w.down_scale, d * scaled), spec.gelu, threads, hidden, added,
        )  # fmt: skip
        x += added
