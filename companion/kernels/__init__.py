"""Triton kernels for decoding and for mixtures of experts, each beside its twin in torch; and two for CPUs.

    import torch
    from companion.kernels import decode_attention, interpret
    interpret(unless_gpu=True)      # before anything imports Triton; on a CPU kernels run in its interpreter
    out = decode_attention(q, k_cache, v_cache, cache_seqlens)

Importing this package does not import Triton; using a kernel does.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .append import append
    from .bench_gpu import bench_gpu
    from .compile import compile_report
    from .copy import copy
    from .cpu import decode_on_cpu
    from .cpu_rows import linear_on_cpu
    from .decode import attend_with_tail, decode_attention, merge_splits
    from .fused_moe import fused_moe
    from .gemm import grouped_gemm
    from .mode import interpret, interpreted, triton_for
    from .policy import use
    from .twin import decode_twin

_EXPORTS = {
    "interpret": "mode",
    "interpreted": "mode",
    "triton_for": "mode",
    "decode_attention": "decode",
    "attend_with_tail": "decode",
    "merge_splits": "decode",
    "decode_on_cpu": "cpu",
    "linear_on_cpu": "cpu_rows",
    "decode_twin": "twin",
    "grouped_gemm": "gemm",
    "fused_moe": "fused_moe",
    "append": "append",
    "copy": "copy",
    "compile_report": "compile",
    "bench_gpu": "bench_gpu",
    "use": "policy",
}

__all__ = [
    "append",
    "attend_with_tail",
    "bench_gpu",
    "compile_report",
    "copy",
    "decode_attention",
    "decode_on_cpu",
    "decode_twin",
    "fused_moe",
    "grouped_gemm",
    "interpret",
    "interpreted",
    "linear_on_cpu",
    "merge_splits",
    "triton_for",
    "use",
]


class _Room(types.ModuleType):
    """A package in which the function `append` stays a function after the file of that name was imported."""

    def __setattr__(self, name, value):
        if not (name in _EXPORTS and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self):
        return sorted(__all__)


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


sys.modules[__name__].__class__ = _Room
