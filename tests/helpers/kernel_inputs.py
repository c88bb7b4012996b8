"""Hostile inputs for the decode kernels, and a float64 oracle that shares nothing with them.

Every slot that the kernel may not read holds NaN, in the caches and in their scales: slots beyond a length,
slots to the left of every window, whole pages of nobody. The block table is a permutation; its padding, and
its entries for pages that no window reaches, are numbers that no pool has.
"""

from dataclasses import dataclass, field

import torch

from companion.quantize import codec

ABSURD = 2_147_480_000
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative Frobenius error
CODECS = {
    "int8": dict(name="int8"),
    "uint8": dict(name="int8", symmetric=False),
    "int4": dict(name="int4"),
    "int4s": dict(name="int4", symmetric=True),
    "fp8_e4m3": dict(name="fp8_e4m3"),
    "fp8_e5m2": dict(name="fp8_e5m2"),
}


@dataclass
class Case:
    """A decode call: `q` and `cache`, the tensors for the kernel; `dense`, per sequence the true k and v."""

    q: torch.Tensor
    lengths: list[int]
    cache: dict
    dense: list[tuple[torch.Tensor, torch.Tensor]]
    options: dict = field(default_factory=dict)
    behind: list[int] | None = None

    def run(self, function, **more):
        cache = dict(self.cache)
        k, v, n = (cache.pop(x) for x in ("k_cache", "v_cache", "cache_seqlens"))
        return function(self.q, k, v, n, **cache, **{**self.options, **more}, return_lse=True)

    def expected(self):
        behind = self.behind or [0] * len(self.lengths)
        rows = [
            oracle(self.q[b], k, v, behind=more, **self.options)
            for b, ((k, v), more) in enumerate(zip(self.dense, behind))
        ]
        return tuple(torch.stack(x) for x in zip(*rows))


def oracle(q, k, v, *, behind=0, softmax_scale=None, window_size=(-1, -1), softcap=0.0, sinks=None):
    """q (Hq, D) or (Sq, Hq, D), k (n, Hkv, D), v (n, Hkv, Dv) -> out, lse, in float64, one head at a time.

    behind: tokens that follow the keys; the queries are the last of those.
    """
    one = q.ndim == 2
    q = (q[None] if one else q).double()
    k, v = k.double(), v.double()
    Sq, Hq, D = q.shape
    n, Hkv = k.shape[:2]
    out, lse = torch.zeros(Sq, Hq, v.shape[2], dtype=torch.float64), torch.full((Hq, Sq), -torch.inf).double()
    for i in range(Sq):
        at = n + behind - Sq + i
        low = 0 if window_size[0] < 0 else max(0, at - window_size[0])
        seen = slice(low, max(low, min(n, at + 1)))
        for h in range(Hq):
            s = k[seen, h // (Hq // Hkv)] @ q[i, h] * (D**-0.5 if softmax_scale is None else softmax_scale)
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            if not len(s):
                continue
            lse[h, i] = total = torch.logsumexp(s, 0)
            if sinks is not None:
                total = torch.logaddexp(total, sinks[h].double())
            out[i, h] = torch.exp(s - total) @ v[seen, h // (Hq // Hkv)]
    return (out[0], lse[:, 0]) if one else (out, lse)


def make(
    lengths,
    heads=(4, 2),
    dim=64,
    v_dim=None,
    dtype=torch.float32,
    *,
    queries=None,
    block_size=None,
    layout="plain",
    kv_format="none",
    latent=False,
    group=32,
    room=None,
    mean=0.1,
    deviation=1.0,
    seed=0,
    behind=None,
    **options,
) -> Case:
    """lengths: keys of each sequence. queries: None for q (B, Hq, D), else Sq. block_size None: contiguous.

    layout: "plain", "heads" (heads before tokens, as a view), "strided" (a view into something wider).
    room: slots of a contiguous cache, or columns of the table. mean, deviation: of keys and values.
    """
    g = torch.Generator().manual_seed(seed)
    Hq, Hkv = heads
    B, v_dim = len(lengths), v_dim or dim
    size = block_size or (room or max(lengths) + 3)
    if kv_format.startswith("kivi") and not block_size:
        size = -(-size // group) * group
    shape = (B, Hq, dim) if queries is None else (B, queries, Hq, dim)
    q = torch.randn(shape, generator=g).to(dtype)
    left = options.get("window_size", (-1, -1))[0]
    more = behind or [0] * B
    first = [0 if left < 0 else max(0, n + m - (queries or 1) - left) for n, m in zip(lengths, more)]

    columns = room or max(-(-n // size) for n in lengths) + 2
    pages = B if block_size is None else sum(-(-n // size) for n in lengths) + 3
    table = torch.arange(B)[:, None] if block_size is None else torch.full((B, columns), ABSURD)
    free = torch.randperm(pages, generator=g).tolist()
    if block_size is not None:
        for b, n in enumerate(lengths):
            for column in range(first[b] // size, -(-n // size)):
                table[b, column] = free.pop()

    fields, dense = {}, []
    for b, n in enumerate(lengths):
        kv = []
        for side, width in (("k", dim), ("v", v_dim)):
            x = deviation * torch.randn(n, Hkv, width, generator=g) + mean
            true, parts = stored(x, side, kv_format, dtype, group)
            kv.append(true)
            if side == "v" and latent:
                continue
            for name, (step, part) in parts.items():
                if f"{side}_{name}" not in fields:
                    shape = pages, size // step, *part.shape[1:]
                    fields[f"{side}_{name}"] = empty(shape, part.dtype, layout)
                store = fields[f"{side}_{name}"]
                for i in range(first[b] // step, part.shape[0]):
                    store[table[b, i * step // size], i * step % size // step] = part[i]
        dense.append((kv[0], kv[0][..., :v_dim] if latent else kv[1]))
    cache = {name.replace("codes", "cache"): x for name, x in fields.items()}
    if latent:
        cache |= {"v_cache": None, "head_dim_v": v_dim}
    cache["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    if block_size is not None:
        cache["block_table"] = table.to(torch.int32)
    if kv_format != "none":
        cache["kv_format"] = {"uint8": "int8", "int4s": "int4"}.get(kv_format, kv_format)
    if behind is not None:
        cache["tail_seqlens"] = torch.tensor(behind, dtype=torch.int32)
    return Case(q, list(lengths), cache, dense, options, behind)


def stored(x, side, kv_format, dtype, group):
    """x (n, Hkv, width) -> what it is after rounding, and {field: (tokens per line, lines)}."""
    if kv_format == "none":
        x = x.to(dtype)
        return x, {"codes": (1, x)}
    if kv_format.startswith("kivi"):
        n = x.shape[0]
        along = side == "k"
        c = codec(f"int{kv_format[4:]}", group=group, group_dim=-2 if along else -1)
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -n % group)).transpose(0, 1)
        qt = c.quantize(padded)
        true = c.dequantize(qt).transpose(0, 1)[:n]
        step = group if along else 1
        lines = {"scale": qt.scale, "zero": qt.zero}
        parts = {name: (step, t.transpose(0, 1)[: -(-n // step)]) for name, t in lines.items()}
        return true, {"codes": (1, qt.codes.transpose(0, 1)[:n]), **parts}
    c = codec(**CODECS[kv_format])
    qt = c.quantize(x)
    codes = qt.codes.view(torch.uint8) if qt.codes.dtype.is_floating_point else qt.codes
    parts = {"codes": (1, codes)}
    for name in ("scale", "zero"):
        if getattr(qt, name) is not None:
            parts[name] = 1, getattr(qt, name)[..., 0]
    return c.dequantize(qt), parts


def empty(shape, dtype, layout):
    """(pages, slots, heads[, width]) full of NaN, or of the byte 0xFF, which is NaN in both kinds of fp8."""
    shape = list(shape)
    if layout == "heads":
        shape[1], shape[2] = shape[2], shape[1]
    elif layout == "strided":
        shape = [n + 3 for n in shape]
    nothing = torch.nan if dtype.is_floating_point else -1 if dtype == torch.int8 else 255
    x = torch.full(shape, nothing, dtype=dtype)
    if layout == "heads":
        return x.transpose(1, 2)
    if layout == "strided":
        return x[tuple(slice(1, n - 2) for n in shape)]
    return x


def check(got, want, dtype, *, lse_tolerance=5e-6):
    """Sequence by sequence: a long one must not hide behind a short one."""
    (out, lse), (true, true_lse) = got, want
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert out.shape == true.shape and lse.shape == true_lse.shape
    assert torch.isfinite(out).all()
    for b in range(out.shape[0]):
        error = (out[b].double() - true[b]).norm() / true[b].norm().clamp_min(1e-300)
        assert error <= TOLERANCE[dtype], f"sequence {b}: relative error {error:.2e}"
    assert torch.equal(lse == -torch.inf, true_lse == -torch.inf) and not lse.isnan().any()
    some = true_lse > -torch.inf
    off = (lse.double() - true_lse)[some].abs() / true_lse[some].abs().clamp_min(1)
    assert not some.any() or off.max() <= lse_tolerance, f"LSE off by {off.max():.2e}"


def tail_of(case: Case, seed: int = 7) -> tuple[dict, Case]:
    """For a case with tokens `behind`: the tail's arguments, and for the oracle the case in one piece."""
    g = torch.Generator().manual_seed(seed)
    (k, v), T = case.dense[0], max(case.behind) + 2
    tails = [torch.full((len(case.behind), T, *x.shape[1:]), torch.nan, dtype=case.q.dtype) for x in (k, v)]
    dense = []
    for b, n in enumerate(case.behind):
        left = case.options.get("window_size", (-1, -1))[0]
        queries = 1 if case.q.ndim == 3 else case.q.shape[1]
        first = 0 if left < 0 else max(0, n - queries - left)
        new = [torch.randn(n, *x.shape[2:], generator=g).to(x.dtype) for x in tails]
        for x, part in zip(tails, new):
            x[b, first:n] = part[first:]
        dense.append(tuple(torch.cat([old.double(), part.double()]) for old, part in zip(case.dense[b], new)))
    whole = Case(case.q, [n + m for n, m in zip(case.lengths, case.behind)], {}, dense, dict(case.options))
    return {"k_tail": tails[0], "v_tail": tails[1]}, whole
