"""One token of every row through all layers of a plain decoder, for a CPU, compiled by Numba.

A step by torch makes some forty calls in every layer. Each finds the caches emptied by the weights that were
read since the last one, the interpreter's own code and data included, and takes several times what it takes
in a loop of its own. Here nothing of Python stands between the layers.
"""

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from .cpu_attention import TILE, decode
from .cpu_loops import gated, linear, rms_norm, turn
from .cpu_numba import compiled, f32


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
        turn(qkv[:, :both], cos, sin)
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
