"""What a model costs: bytes, FLOPs and predicted time, from its shape alone. Standard library only.

    from companion.cost import models, kv_bytes, size
    kv_bytes("llama-3.1-8b", 8192)                             # 1_073_741_824
    size("llama-3.1-8b", "h100-sxm", batch=8, context=32768)   # does it fit, how many users, how fast

Bytes are integers. `models` and `hardware` are read-only tables whose rows carry their sources; every
function takes a name from them or a spec of one's own.
"""

import importlib
from typing import TYPE_CHECKING

from ..formats import bits_per_value
from .answer import Lever, Sizing
from .deployment import Deployment
from .engines import Pages, vllm_flags
from .flops import (
    attention_crossover,
    attention_flops_per_key,
    attention_intensity,
    compute_bound_context,
    decode_attention_flops,
    decode_flops,
    intensity,
    prefill_attention_flops,
    prefill_flops,
)
from .levers import Bar, Crossings, budget, crossings, levers
from .memory import (
    ParameterCount,
    active_parameters,
    cached_values,
    experts_touched,
    kv_bytes,
    kv_bytes_per_token,
    kv_fixed_bytes,
    kv_growth_per_token,
    linear_state_bytes,
    matmul_parameters,
    parameter_count,
    parameters,
    share_of_cache,
    weight_bytes,
    weight_bytes_read,
)
from .parts import MLASpec, MoESpec, RoutingSpec
from .registry import HardwareSpec, UnknownName, hardware, models
from .sizing import size
from .spec import ModelSpec
from .step import (
    StepCost,
    best_draft_length,
    cache_equals_weights,
    decode_step,
    expected_tokens,
    predicted_pass_cost,
    prefill,
    speculative_speedup,
    verify_pass,
)
from .wire import (
    Exchange,
    ParallelBytes,
    Wire,
    cache_copies,
    on_wire,
    parallel_bytes,
    rank_parameters,
    rank_spec,
)

if TYPE_CHECKING:
    from .checkpoint import read_gguf
    from .report import Comparison

__all__ = [
    "Bar",
    "Comparison",
    "Crossings",
    "Deployment",
    "Exchange",
    "HardwareSpec",
    "Lever",
    "MLASpec",
    "MoESpec",
    "ModelSpec",
    "Pages",
    "ParallelBytes",
    "ParameterCount",
    "RoutingSpec",
    "Sizing",
    "StepCost",
    "UnknownName",
    "Wire",
    "active_parameters",
    "attention_crossover",
    "attention_flops_per_key",
    "attention_intensity",
    "best_draft_length",
    "bits_per_value",
    "budget",
    "cache_copies",
    "cache_equals_weights",
    "cached_values",
    "compute_bound_context",
    "crossings",
    "decode_attention_flops",
    "decode_flops",
    "decode_step",
    "expected_tokens",
    "experts_touched",
    "hardware",
    "intensity",
    "kv_bytes",
    "kv_bytes_per_token",
    "kv_fixed_bytes",
    "kv_growth_per_token",
    "levers",
    "linear_state_bytes",
    "matmul_parameters",
    "models",
    "on_wire",
    "parallel_bytes",
    "parameter_count",
    "parameters",
    "predicted_pass_cost",
    "prefill",
    "prefill_attention_flops",
    "prefill_flops",
    "rank_parameters",
    "rank_spec",
    "read_gguf",
    "share_of_cache",
    "size",
    "speculative_speedup",
    "verify_pass",
    "vllm_flags",
    "weight_bytes",
    "weight_bytes_read",
]

# What few callers need loads when it is used.
_LATE = {"Comparison": "report", "read_gguf": "checkpoint"}


def __getattr__(name: str):
    if name in _LATE:
        return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
