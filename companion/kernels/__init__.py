"""Kernels for decoding and for mixtures of experts, each beside its reference in torch; two of them for CPUs.

    decode   attention of the newest tokens over a cache
    append   new keys and values into a cache
    moe      products grouped by expert
    copy     the ceiling: bytes moved and nothing else
    cpu      decode attention and products, compiled by Numba
    aot      kernels compiled for devices that are not here
    bench    kernels checked and timed on the device that is

    import torch
    from companion.kernels import decode_attention, interpret
    interpret(unless_gpu=True)      # before anything imports Triton; on a CPU kernels run in its interpreter
    out = decode_attention(q, k_cache, v_cache, cache_seqlens)

A folder has its call in `__init__.py`, what Triton compiles in `kernel.py`, the same in torch in
`reference.py`, and launches written down for the offline compiler in `cases.py`. Importing this package does
not import Triton; using a kernel does. `append` and `copy` are functions of the folders of their names.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .aot import compile_report
    from .bench.gpu import bench_gpu
    from .cpu import decode_on_cpu, linear_on_cpu
    from .decode import attend_with_tail, decode_attention, merge_splits
    from .decode.reference import decode_reference
    from .mode import interpret, interpreted, triton_for, use
    from .moe import fused_moe
    from .moe.gemm import grouped_gemm

_HOMES = {
    "attend_with_tail": "decode",
    "bench_gpu": "bench.gpu",
    "compile_report": "aot",
    "decode_attention": "decode",
    "decode_on_cpu": "cpu",
    "decode_reference": "decode.reference",
    "fused_moe": "moe",
    "grouped_gemm": "moe.gemm",
    "interpret": "mode",
    "interpreted": "mode",
    "linear_on_cpu": "cpu",
    "merge_splits": "decode",
    "triton_for": "mode",
    "use": "mode",
}

__all__ = [
    "attend_with_tail",
    "bench_gpu",
    "compile_report",
    "decode_attention",
    "decode_on_cpu",
    "decode_reference",
    "fused_moe",
    "grouped_gemm",
    "interpret",
    "interpreted",
    "linear_on_cpu",
    "merge_splits",
    "triton_for",
    "use",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return __all__
