"""Decode attention for a CPU, compiled by Numba: the plan of the Triton kernel, written as loops.

A decode step multiplies the few query heads that share a key head with thousands of keys. Three rows are too
few for a library's matrix product, and torch's fused attention reads each key once per query head. Here a
thread goes along the keys once: scores of a tile, their weights, its values, with an online softmax. The
tiles of all rows and heads are laid end to end and cut evenly, so that 3 heads keep 2 threads busy; where a
row is cut, its parts are merged by their LSEs.

How the loops are compiled, and what is kept on disk of it, stands first. This file imports Numba, so nothing
imports it before a loop is first used.

Sources: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2023, "Flash-Decoding" (splits and merging).
"""

import hashlib
import math
from pathlib import Path

import numpy as np
from numba import njit, prange

f32 = np.float32


# Sums may be taken in any order, so that eight of them go side by side; NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}


LOOP = {"fastmath": FAST, "error_model": "numpy", "nogil": True}


def digest(folder: Path) -> str:
    """Of all the loops: Numba's own check looks at one file, and would keep what calls into another."""
    rooms = [folder / "attention.py", folder / "loops.py"]
    return hashlib.sha256(b"".join(room.read_bytes() for room in rooms)).hexdigest()[:12]


DIGEST = digest(Path(__file__).parent)


def compiled(function, **options):
    """Compiled when first called, and kept on disk where there is a folder that may be written to."""
    options = {"nogil": True, "error_model": "numpy", **options}
    function.__qualname__ += f"_{DIGEST}"  # names the file on disk
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no such folder: compiled again in every process
        return njit(**options)(function)


def compiled_for_threads(function):
    """The same, with its `prange` loops on all threads."""
    return compiled(function, parallel=True)


TILE = 128  # keys between two looks at the running maximum
LN2 = math.log(2)


@njit
def plan(first, stops, kv_heads, parts):
    """Cut the tiles of all rows evenly into parts.

    Row r = b * kv_heads + head has keys first[b] .. stops[b] - 1. Returns pieces (n, 3) of (row, from, to) in
    the order of rows, and begins (parts + 1,): part p has pieces begins[p] .. begins[p + 1] - 1.
    """
    rows = len(stops) * kv_heads
    tiles = np.zeros(rows, np.int64)
    for r in range(rows):
        b = r // kv_heads
        tiles[r] = max(0, (stops[b] - first[b] + TILE - 1) // TILE)
    total = tiles.sum()
    pieces = np.empty((rows + parts, 3), np.int64)
    begins = np.empty(parts + 1, np.int64)
    n = r = done = 0
    for p in range(parts):
        begins[p] = n
        left = total * (p + 1) // parts - total * p // parts
        while left > 0:
            take = min(left, tiles[r] - done)
            if take > 0:
                b = r // kv_heads
                pieces[n, 0] = r
                pieces[n, 1] = first[b] + done * TILE
                pieces[n, 2] = min(first[b] + (done + take) * TILE, stops[b])
                n += 1
            done += take
            left -= take
            if done == tiles[r]:
                r += 1
                done = 0
    begins[parts] = n
    return pieces[:n], begins


@njit(inline="always", fastmath=FAST)
def power_of_two(x):
    """2 ** x in float32 for x <= 0, within 2.5e-7 of it; 2 ** -126 stands for all that is smaller.

    The math library takes one number at a time; of these operations the compiler does eight at a time.
    """
    x = max(x, f32(-126))
    whole = np.floor(x + f32(0.5))
    f = x - whole  # -0.5 .. 0.5, where the polynomial of least relative error is off by 7.5e-8
    p = f32(0.0013276471)
    p = p * f + f32(0.009675542)
    p = p * f + f32(0.05550713)
    p = p * f + f32(0.2402212)
    p = p * f + f32(0.69314694)
    p = p * f + f32(1.0000001)
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(fastmath=FAST, error_model="numpy")
def attend_part(
    q, k, v, k_strides, v_strides, table, size, kv_heads, scale, softcap, pieces, begin, end, out, lse
):
    """Attention of pieces begin .. end - 1, each into its place of out (pieces, G, Dv) and lse (pieces, G).

    q (rows, G, D). k, v: flat memory, in which token `slot` of a page has head h at page * strides[0] +
    slot * strides[1] + h * strides[2]. table (B, columns): a row's pages of `size` tokens. scale: makes the
    scores powers of 2, as lse is; with a softcap it is the softmax's own.
    """
    G, D, Dv = q.shape[1], q.shape[2], out.shape[2]
    rows = np.empty((G, D), np.float32)
    s = np.empty((G, TILE), np.float32)
    k_at, v_at = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    m, l = np.empty(G, np.float32), np.empty(G, np.float32)
    for piece in range(begin, end):
        row, low, high = pieces[piece]
        b, h = row // kv_heads, row % kv_heads
        acc = out[piece]
        acc[:] = 0
        m[:] = -np.inf
        l[:] = 0
        for g in range(G):
            for d in range(D):
                rows[g, d] = q[row, g, d] * scale
        column, slot = low // size, low % size
        for t in range(low, high, TILE):
            n = min(TILE, high - t)
            j = 0
            while j < n:  # the keys of a page lie at even distances
                page = np.int64(table[b, column])
                k_page = page * k_strides[0] + slot * k_strides[1] + h * k_strides[2]
                v_page = page * v_strides[0] + slot * v_strides[1] + h * v_strides[2]
                here = min(n - j, size - slot)
                for i in range(here):
                    k_at[j + i] = k_page + i * k_strides[1]
                    v_at[j + i] = v_page + i * v_strides[1]
                j += here
                slot += here
                if slot == size:
                    slot = 0
                    column += 1
            score(rows, k, k_at, n, s)
            for g in range(G):
                m[g], l[g] = soften(s[g], n, softcap, m[g], l[g], acc[g])
            add_values(s, v, v_at, n, acc)
        for g in range(G):
            lse[piece, g] = m[g] + math.log2(l[g])
            share = f32(1) / l[g]
            for d in range(Dv):
                acc[g, d] *= share


@njit(inline="always", fastmath=FAST)
def score(rows, k, at, n, s):
    """s[g, j] = rows[g] . key j. Four keys at a time share a row's numbers."""
    G, D = rows.shape
    for j in range(0, n - 3, 4):
        a, b, c, e = at[j], at[j + 1], at[j + 2], at[j + 3]
        ka, kb, kc, ke = k[a : a + D], k[b : b + D], k[c : c + D], k[e : e + D]
        for g in range(G):
            row = rows[g]
            sa = sb = sc = se = f32(0)
            for d in range(D):
                sa += row[d] * ka[d]
                sb += row[d] * kb[d]
                sc += row[d] * kc[d]
                se += row[d] * ke[d]
            s[g, j], s[g, j + 1], s[g, j + 2], s[g, j + 3] = sa, sb, sc, se
    for j in range(n - n % 4, n):
        key = k[at[j] : at[j] + D]
        for g in range(G):
            row = rows[g]
            x = f32(0)
            for d in range(D):
                x += row[d] * key[d]
            s[g, j] = x


@njit(fastmath=True)
def highest(s, n):
    """The largest of n >= 1 scores; a NaN among them may be passed over here, and still reaches the sum."""
    top = s[0]
    for j in range(1, n):
        top = max(top, s[j])
    return top


@njit(inline="always", fastmath=FAST)
def soften(s, n, softcap, m, l, acc):
    """Scores of one query head into weights, relative to the new maximum; acc and l are brought to it."""
    if softcap > 0:
        for j in range(n):
            s[j] = f32(softcap * math.tanh(s[j] / softcap) * (1 / LN2))
    top = max(m, highest(s, n))
    shrink = power_of_two(m - top)
    total = f32(0)
    for j in range(n):
        w = power_of_two(s[j] - top)
        s[j] = w
        total += w
    for d in range(len(acc)):
        acc[d] *= shrink
    return top, l * shrink + total


@njit(inline="always", fastmath=FAST)
def add_values(s, v, at, n, acc):
    """acc[g] += sum over j of s[g, j] * value j. Four values at a time share a reading of acc."""
    G, Dv = acc.shape
    for j in range(0, n - 3, 4):
        a, b, c, e = at[j], at[j + 1], at[j + 2], at[j + 3]
        va, vb, vc, ve = v[a : a + Dv], v[b : b + Dv], v[c : c + Dv], v[e : e + Dv]
        for g in range(G):
            total = acc[g]
            wa, wb, wc, we = s[g, j], s[g, j + 1], s[g, j + 2], s[g, j + 3]
            for d in range(Dv):
                total[d] += wa * va[d] + wb * vb[d] + wc * vc[d] + we * ve[d]
    for j in range(n - n % 4, n):
        value = v[at[j] : at[j] + Dv]
        for g in range(G):
            total = acc[g]
            w = s[g, j]
            for d in range(Dv):
                total[d] += w * value[d]


@njit
def merge(pieces, parts, part_lse, sinks, out, lse):
    """Fill out (rows, G, Dv) and lse (rows, G), natural logarithm, from pieces. sinks (Hkv, G), or empty."""
    G, Dv = out.shape[1], out.shape[2]
    at = 0
    for r in range(len(out)):
        end = at
        while end < len(pieces) and pieces[end, 0] == r:
            end += 1
        for g in range(G):
            top = -np.inf
            for i in range(at, end):
                top = max(top, part_lse[i, g])
            total = 0.0
            for i in range(at, end):
                total += 2.0 ** (part_lse[i, g] - top)
            lse[r, g] = (top + math.log2(total)) * LN2 if end > at else -np.inf
            if len(sinks) and end > at:
                total += 2.0 ** (sinks[r % len(sinks), g] / LN2 - top)
            for d in range(Dv):
                out[r, g, d] = 0
            for i in range(at, end):
                weight = f32(2.0 ** (part_lse[i, g] - top) / total)
                for d in range(Dv):
                    out[r, g, d] += weight * parts[i, g, d]
        at = end


@compiled_for_threads
def decode(q, k, v, k_strides, v_strides, table, size, first, stops, parts, scale, softcap, sinks, out, lse):
    """Fill out (rows, G, Dv) and lse (rows, G): plan, all parts at once on Numba's threads, merge."""
    kv_heads = len(out) // len(stops)
    pieces, begins = plan(first, stops, kv_heads, parts)
    part_out = np.empty((len(pieces), *out.shape[1:]), np.float32)
    part_lse = np.empty((len(pieces), out.shape[1]), np.float32)
    for p in prange(parts):
        attend_part(
            q, k, v, k_strides, v_strides, table, size, kv_heads, scale, softcap,
            pieces, begins[p], begins[p + 1], part_out, part_lse,
        )  # fmt: skip
    merge(pieces, part_out, part_lse, sinks, out, lse)
