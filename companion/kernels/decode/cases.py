"""The decode kernels as they are launched, for the offline compiler: calls on tensors that have no memory."""

from functools import partial

import torch

from ...formats import INT4, INT8, KERNELS
from ..aot.case import Case, Expect, Target
from .checks import Call, check_call
from .launch import arguments, constexprs, merge_arguments, tile_for
from .splits import Splits, Tile

_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}
_CODES = {
    name: (torch.int8 if f is INT8 else torch.uint8, f.per_byte)
    for name, f in KERNELS.items()
    if f.is_integer
}


def _call(
    dtype=torch.float16,
    heads=32,
    kv_heads=8,
    head_dim=128,
    v_dim=None,
    queries=1,
    paged=False,
    kv_format="none",
    latent=False,
    window=None,
    softcap=0.0,
) -> Call:
    """A decode call of four sequences over 4,096 tokens, as `decode_attention` sees it."""
    empty = partial(torch.empty, device="meta")
    B, pages, slots = 4, *((1024, 64) if paged else (4, 4096))
    codes, per_byte = _CODES.get(kv_format, (torch.uint8 if kv_format != "none" else dtype, 1))
    v_dim = v_dim or head_dim
    shape = pages, slots, kv_heads
    scales = {}
    if kv_format in (INT8.kernel, INT4.kernel):
        scales = {f"{x}_scale": empty(shape, dtype=torch.float16) for x in "kv"}
    elif kv_format.startswith("kivi"):
        for name in ("scale", "zero"):
            scales[f"k_{name}"] = empty(pages, slots // 32, kv_heads, head_dim, dtype=torch.float16)
            scales[f"v_{name}"] = empty(*shape, v_dim // 32, dtype=torch.float16)
    return check_call(
        empty(B, queries, heads, head_dim, dtype=dtype),
        empty(*shape, head_dim // per_byte, dtype=codes),
        None if latent else empty(*shape, v_dim // per_byte, dtype=codes),
        empty(B, dtype=torch.int32),
        block_table=empty(B, 64, dtype=torch.int32) if paged else None,
        head_dim_v=v_dim,
        kv_format=kv_format,
        window_size=(-1 if window is None else window - 1, -1),
        softcap=softcap,
        **scales,
    )


def _signature(given: dict) -> dict[str, str]:
    """Triton's types of run-time arguments."""
    kinds = {int: "i32", float: "fp32"}
    return {n: _TYPES[x.dtype] if isinstance(x, torch.Tensor) else kinds[type(x)] for n, x in given.items()}


def _decode(name: str, **shape) -> Case:
    call = _call(**shape)
    B, Sq, Hq, _ = call.q.shape
    out = torch.empty(B, Sq, Hq, 4, call.v_dim, device="meta")
    given = arguments(call, out, out[..., 0].transpose(1, 2), Splits(4, 1024))

    def adapt(case: Case, target: Target) -> Case | None:
        capability = target.capability or (9, 4)
        if capability < (8, 0) and call.q.dtype == torch.bfloat16:
            return None
        tile = tile_for(call, capability)
        constants = {**constexprs(call, tile), "WIDE": not tile.dot}
        launch = dict(num_warps=tile.warps, num_stages=tile.stages)
        return case.but(constexprs=constants, expect=_expect(call, tile), **launch)

    return Case(
        f"decode.{name}", "companion.kernels.decode.kernel:decode_kernel", _signature(given), adapt=adapt
    )


def _expect(call: Call, tile: Tile) -> Expect:
    """Codes come in fewer bytes, and scales two bytes at a time: there the loads are narrower."""
    wide = {"none": 0.5, "int8": 0.1, "fp8_e4m3": 0.4, "fp8_e5m2": 0.4}.get(call.kv_format, 0.0)
    simple = call.kv_format == "none" and (tile.dot or not call.latent)
    return Expect(spills=0 if simple else 16, wide=wide, matrix=tile.dot)


_half, _brain, _single = torch.float16, torch.bfloat16, torch.float32
_latent = dict(heads=128, kv_heads=1, head_dim=576, v_dim=512, latent=True)
CASES = [
    _decode("fp16"),
    _decode("bf16", dtype=_brain),
    _decode("fp32", dtype=_single),
    _decode("fp16.paged", paged=True),
    _decode("bf16.paged", dtype=_brain, paged=True),
    _decode("fp16.window.softcap", window=1024, softcap=50.0),
    _decode("fp16.64", heads=9, kv_heads=3, head_dim=64),
    _decode("fp16.96", heads=32, kv_heads=32, head_dim=96),
    _decode("fp16.256", heads=8, kv_heads=4, head_dim=256),
    _decode("fp16.drafts", queries=16),
    _decode("bf16.latent", dtype=_brain, **_latent),
    _decode("fp16.latent", **_latent),
    *(
        _decode(f"{d}.{f}{'.paged' * paged}", dtype=t, kv_format=f, paged=paged)
        for d, t in (("fp16", _half), ("bf16", _brain))
        for f in KERNELS
        for paged in (False, True)
    ),
]


def _merge(name: str, dtype: torch.dtype, v_dim=128, sinks=False) -> Case:
    given = merge_arguments(
        torch.empty(4, 1, 32, 8, v_dim, device="meta"),
        torch.empty(4, 32, 1, 8, device="meta"),
        torch.empty(32, device="meta") if sinks else None,
        torch.empty(4, 1, 32, v_dim, dtype=dtype, device="meta"),
        torch.empty(4, 32, 1, device="meta"),
    )
    constants = {n: given.pop(n) for n in ("DV", "BLOCK_D", "BLOCK_S", "HAS_SINKS")}
    return Case(f"merge.{name}", "companion.kernels.decode.kernel:merge_kernel", _signature(given), constants)


CASES += [
    _merge("fp16", _half),
    _merge("bf16.sinks", _brain, sinks=True),
    _merge("bf16.512", _brain, 512),
]
