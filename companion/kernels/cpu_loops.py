"""What a decode step does to a few rows besides attention, for a CPU, compiled by Numba.

A product of a few rows takes as long as reading the matrix, if nothing else is in the way. A library cuts the
matrix into blocks, which pays when many rows use them; here a thread goes along its part of the matrix as it
lies, one output after the other, and the processor fetches ahead. What stands between the products is small
arithmetic, of which torch makes a dozen calls and these loops one.
"""

import math

import numpy as np
from numba import njit, prange

from .cpu_numba import LOOP, compiled_for_threads, f32

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
def turn(x, cos, sin):
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
