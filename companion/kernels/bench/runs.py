"""What `companion bench --gpu` times: each kernel at the size of a model, checked, predicted and measured."""

from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from ...formats import INT4
from .. import decode_attention, fused_moe, grouped_gemm
from ..append import append
from ..append.reference import append_reference
from ..copy import copy, copy_bytes, copy_reference
from ..decode.checks import check_call
from ..decode.launch import prepare
from ..decode.splits import decode_kernel_bytes
from ..moe.plan import moe_kernel_bytes
from .cases import (
    DTYPES,
    KIVI_GROUP,
    LLAMA,
    TOLERANCE,
    DecodeCase,
    MoECase,
    decode_exact,
    decode_inputs,
    judge,
    moe_exact,
    moe_inputs,
    relative_error,
)
from .checks import baselines, different
from .report import copy_line

TO_BUILD = 90.0  # seconds that FlashInfer may take to compile when it is first used

# --- the ceiling -------------------------------------------------------------------------------------------


def copies(bench) -> None:
    """What a copy reaches, by our kernel and by torch's; the best of the largest size is the ceiling."""
    for mib in (1 / 64,) if bench.dry_run else (64, 512):
        x = torch.ones(int(mib * 2**20) // 4, device=bench.device)
        y = torch.empty_like(x)
        for name, call in (("copy kernel", copy), ("torch copy_", copy_reference)):
            timing = bench.timer(partial(call, x, y))
            row = {"name": f"{name}, {mib:g} MiB", "bytes": copy_bytes(x), "timing": timing.row()}
            row["seconds"] = max(timing.median, 1e-12)
            row["bytes_per_s"] = row["bytes"] / row["seconds"]
            bench.found["copies"].append(row)
            bench.say(copy_line(row))
    bench.bandwidth = max(row["bytes_per_s"] for row in bench.found["copies"][-2:])


# --- fast or slow ------------------------------------------------------------------------------------------


def decode(bench, case: DecodeCase) -> None:
    """One decode step of one layer; two sequences of it against float64."""
    h = case.heads
    row = dict(
        name=case.name, kernel="decode_attention", model=h.model, heads=h.heads, kv_heads=h.kv_heads,
        head_dim=h.head_dim, v_head_dim=h.v_head_dim, batch=case.batch, length=case.length, dtype=case.dtype,
        kv_format=case.kv_format, layout=case.layout, kv_bytes=case.kv_bytes,
    )  # fmt: skip

    def run(row):
        inputs = decode_inputs(case, bench.device)
        options = dict(max_seqlen=case.length, check=False)
        launch = prepare(check_call(**inputs), **options)
        moved = decode_kernel_bytes(
            [case.length] * case.batch,
            heads=h.heads,
            kv_heads=h.kv_heads,
            head_dim=h.head_dim,
            v_head_dim=h.v_head_dim,
            latent=h.latent,
            dtype=case.dtype,
            kv_format=case.kv_format,
            offsets=case.kv_format == INT4.kernel,
            group=KIVI_GROUP,
            block_size=case.block_size,
            splits=launch.splits.count,
            split_size=launch.splits.size,
        )
        row |= {"bytes": vars(moved) | {"total": moved.total}, "splits": launch.splits.count}
        row["flops"] = 2 * case.batch * h.heads * case.length * (h.head_dim + h.v_head_dim)
        row["tile"] = vars(launch.tile)
        out, lse = decode_attention(**inputs, **options, return_lse=True)
        errors = []
        for b in {0, case.batch - 1}:
            want, want_lse = decode_exact(case, inputs, b)
            errors += [relative_error(out[b], want), relative_error(lse[b], want_lse)]
        judge(row, max(errors), TOLERANCE[case.dtype])
        row = bench.time(lambda: decode_attention(**inputs, **options), row, moved.total)
        place = (h, case.batch, case.length, case.dtype)
        if case.kv_format == "none" and not case.paged:
            made = baselines(case, inputs, slow=bench.end - bench.clock() > TO_BUILD)
            bench.baselines[place] = {name: bench.beside(prepare) for name, prepare in made.items()}
        if case.kv_format == "none":  # pages are compared with the same sequences in one piece
            row["baselines"] = dict(bench.baselines.get(place, {}))
        return row

    bench.case(row, run)


def experts(bench, case: MoECase) -> None:
    """A layer of experts, and its first product alone, beside a loop over the experts in torch."""
    row = {k: getattr(case, k) for k in ("model", "dtype", "tokens", "experts", "top_k")}
    bench.case(dict(name=case.name, kernel="fused_moe", **row), partial(_layer, bench, case))
    up = case.name.replace("moe", "moe w1", 1)
    bench.case(dict(name=up, kernel="grouped_gemm", **row), partial(_up, bench, case))


def _layer(bench, case, row):
    x, w1, w2, weights, ids = layer = moe_inputs(case, bench.device)
    sizes = torch.bincount(ids.flatten(), minlength=case.experts).tolist()
    widths = {"tokens": case.tokens, "d_model": case.d_model, "ffn": case.ffn}
    moved = moe_kernel_bytes(sizes, **widths, element_bytes=x.element_size())
    row["bytes"] = vars(moved) | {"total": moved.total}
    out, few = fused_moe(*layer), slice(0, 4)
    want = moe_exact(x[few], w1, w2, weights[few], ids[few])
    judge(row, relative_error(out[few], want), TOLERANCE[case.dtype])
    row = bench.time(partial(fused_moe, *layer, check_ids=False), row, moved.total)
    straddling = partial(fused_moe, *layer, check_ids=False, form="straddle")
    row["baselines"] = {
        "torch loop": bench.beside(partial(_loop, *layer, sizes)),
        "straddling tiles": bench.beside(lambda: straddling),
    }
    return row


def _up(bench, case, row):
    x, w1, _, _, ids = moe_inputs(case, bench.device)
    sizes = torch.bincount(ids.flatten(), minlength=case.experts).tolist()
    ends = list(accumulate(sizes, initial=0))
    rows = x[ids.flatten().argsort(stable=True) // case.top_k]
    args = rows, w1, torch.tensor(ends, dtype=torch.int32, device=bench.device)
    spans = [(e, *pair) for e, pair in enumerate(pairwise(ends)) if sizes[e]]
    moved = {
        "weights": len(spans) * w1[0].nbytes,
        "x": rows.nbytes,
        "out": rows.nbytes // case.d_model * w1.shape[1],
    }
    row["bytes"] = moved | {"total": sum(moved.values())}
    out = grouped_gemm(*args)
    busiest = sorted(spans, key=lambda span: span[2] - span[1])[-2:]
    errors = [relative_error(out[a:b], rows[a:b].double() @ w1[e].double().T) for e, a, b in busiest]
    judge(row, max(errors), TOLERANCE[case.dtype])
    row = bench.time(partial(grouped_gemm, *args), row, row["bytes"]["total"])

    def loop():
        return [F.linear(rows[a:b], w1[e]) for e, a, b in spans]

    row["baselines"] = {"torch loop": bench.beside(lambda: loop)}
    return row


def _loop(x, w1, w2, weights, ids, sizes):
    """Expert after expert in torch; who goes where is known before the clock runs."""
    plan = [(e, *(ids == e).nonzero(as_tuple=True)) for e, n in enumerate(sizes) if n]

    def call():
        out = torch.zeros_like(x, dtype=torch.float32)
        for e, t, j in plan:
            gate, up = F.linear(x[t], w1[e]).chunk(2, dim=-1)
            out.index_add_(0, t, F.linear(F.silu(gate) * up, w2[e]).float() * weights[t, j, None])
        return out.to(x.dtype)

    return call


def writes(bench) -> None:
    """A prompt's keys and values into pages, in every format that is written token by token."""
    T = 64 if bench.dry_run else 16384
    for kv_format in ("none", "int8", INT4.kernel, "fp8_e4m3"):
        name = f"append {T} tokens {bench.dtype} {kv_format} paged"
        row = dict(name=name, kernel="append", model=LLAMA.model, dtype=bench.dtype, kv_format=kv_format)
        bench.case(row, partial(_write, bench, T, kv_format))


def _write(bench, T, kv_format, row):
    size, Hkv, D = 16, *((2, 32) if bench.dry_run else (LLAMA.kv_heads, LLAMA.head_dim))
    g = torch.Generator(bench.device).manual_seed(5)
    to = {"generator": g, "device": bench.device}
    k, v = (torch.randn(T, Hkv, D, **to).to(DTYPES[bench.dtype]) for _ in "kv")
    slots = torch.randperm(T, **to)
    dtype = {"none": k.dtype, "int8": torch.int8}.get(kv_format, torch.uint8)
    pages, width = (T // size, size, Hkv), D // 2 if kv_format == INT4.kernel else D
    caches = [torch.zeros(*pages, width, dtype=dtype, device=bench.device) for _ in "kv"]
    names = {"int8": ["scale"], INT4.kernel: ["scale", "zero"]}.get(kv_format, [])
    fields = {
        f"{x}_{n}": torch.zeros(pages, dtype=torch.float16, device=bench.device) for x in "kv" for n in names
    }

    def call():
        append(k, v, *caches, slot_mapping=slots, kv_format=kv_format, **fields)

    call()
    few = slots[:64].cpu()  # against the reference, on the CPU: there a division is exact
    blank = [torch.zeros(*pages, width, dtype=dtype) for _ in "kv"]
    again = {n: torch.zeros(pages, dtype=torch.float16) for n in fields}
    append_reference(k[:64].cpu(), v[:64].cpu(), *blank, slot_mapping=few, kv_format=kv_format, **again)
    at = few // size, few % size
    pairs = [*zip(caches, blank), *((fields[n], again[n]) for n in fields)]
    judge(row, max(different(mine.cpu()[at], his[at]) for mine, his in pairs), 0.0)
    moved = sum(t.nbytes for t in (k, v, slots, *caches, *fields.values()))
    row["bytes"] = {"total": moved}
    return bench.time(call, row, moved)
