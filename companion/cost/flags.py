"""The flags of an existing server that realise a sizing: vLLM.

Every name here stands in `vllm/engine/arg_utils.py` of vLLM 0.32.0, every format in its `CacheDType`; what
the flags mean is in docs.vllm.ai (engine arguments, data parallel deployment, expert parallel deployment).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sizing import Sizing

VERSION = "0.32.0"
# vLLM's --kv-cache-dtype takes these names of ours; others have no flag.
KV_DTYPES = {"fp8": "fp8", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "nvfp4": "nvfp4"}
_NEEDS = {"nvfp4": "needs fp4 units, and older versions have no flag for a nvfp4 cache"}
# Its default share of the memory, of 0.32.0 and of versions before: a plan that needs more says so.
DEFAULT_SHARE = 0.9
FLAGS = (
    "--max-model-len", "--max-num-seqs", "--tensor-parallel-size", "--data-parallel-size",
    "--enable-expert-parallel", "--dtype", "--quantization", "--kv-cache-dtype", "--block-size",
    "--max-num-batched-tokens", "--disable-hybrid-kv-cache-manager", "--gpu-memory-utilization",
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command line and what it leaves open. `arguments` begin after "vllm serve CHECKPOINT"."""

    arguments: tuple[str, ...]
    notes: tuple[str, ...] = ()
    version: str = VERSION

    def __str__(self) -> str:
        return " ".join(("vllm serve CHECKPOINT", *self.arguments))

    def to_dict(self) -> dict:
        return {"command": str(self), "notes": list(self.notes), "version": self.version}


def vllm_flags(sizing: Sizing) -> Command:
    """The flags for a deployment that fits; where no flag does what was sized, a note says so."""
    parts = [f"--max-model-len {sizing.context}"]
    notes = []
    groups = sizing.expert or 1
    parts.append(f"--max-num-seqs {-(-sizing.batch // groups)}")
    tensor = sizing.devices if sizing.tensor is None else sizing.tensor
    if sizing.tensor is None and sizing.kv_sharding == "batch" and sizing.devices > 1:
        notes.append(
            "a cache divided by sequences: see --tensor and --expert here, --data-parallel-size there"
        )
    if tensor > 1:
        parts.append(f"--tensor-parallel-size {tensor}")
    if groups > 1:
        parts.append(f"--data-parallel-size {groups} --enable-expert-parallel")
        notes.append("--max-num-seqs is for each data-parallel rank")
    if sizing.compute_dtype == "fp16" and sizing.weights_dtype in ("bf16", "fp16"):
        parts.append("--dtype float16")
    if sizing.weights_dtype == "fp8":
        parts.append("--quantization fp8")
    if sizing.kv_dtype in KV_DTYPES:
        parts.append(f"--kv-cache-dtype {KV_DTYPES[sizing.kv_dtype]}")
        if sizing.kv_dtype in _NEEDS:
            notes.append(_NEEDS[sizing.kv_dtype])
    elif sizing.kv_dtype not in ("bf16", "fp16"):
        notes.append(f"no flag for a {sizing.kv_dtype} cache")
    if sizing.weights_dtype not in ("bf16", "fp16", "fp32", "fp8"):
        notes.append(f"CHECKPOINT must be stored as {_bits(sizing.weights_dtype)}")
    if sizing.block_size is not None and sizing.block_size != 16:
        parts.append(f"--block-size {sizing.block_size}")
    if sizing.step_tokens > 1:
        parts.append(f"--max-num-batched-tokens {sizing.step_tokens}")
    if sizing.pages == "unified":
        parts.append("--disable-hybrid-kv-cache-manager")
    share = sizing.bytes_per_device / sizing.device_bytes
    if share > DEFAULT_SHARE:
        parts.append(f"--gpu-memory-utilization {min(1.0, math.ceil(share * 100) / 100):.2f}")
    return Command(tuple(parts), tuple(notes))


def vllm_command(sizing: Sizing) -> str:
    """`vllm_flags` as one line, with a comment where no flag does."""
    command = vllm_flags(sizing)
    return str(command) + (f"   # {'; '.join(command.notes)}" if command.notes else "")


def _bits(dtype: str) -> str:
    try:
        return f"{float(dtype):g} bits per value"
    except ValueError:
        return dtype
