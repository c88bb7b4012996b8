"""What an engine makes of a plan: the slots that its pages take, and the flags that realise it (vLLM).

A slot is the room for one token in one layer.

| pages | a sliding layer holds | which engine |
|---|---|---|
| "exact" | min(n, window) tokens | a cache per layer; with a block size, n rounded up to whole blocks |
| "grouped" | the blocks that its window can touch, and padding | vLLM's hybrid manager: one pool of pages |
| "unified" | every token | one block table for all layers (vLLM with --disable-hybrid-kv-cache-manager) |

"grouped": layers are put into groups of equal size, so that a page of any group has the same bytes. The size
is the number of layers of the rarer kind (or of the commoner one, where that is less than half as many
again); a group that is not full is padded. A sliding group keeps the window and the tokens of a step, and
one block more, since a window seldom begins where a block does.
Source: vLLM, docs/design/hybrid_kv_cache_manager.md; `_get_kv_cache_groups_uniform_page_size` and
`SlidingWindowSpec.max_admission_blocks_per_request` of version 0.32.0. Other versions pad otherwise.

Every flag stands in `vllm/engine/arg_utils.py` of vLLM 0.32.0, every format in its `CacheDType`; what flags
mean is in docs.vllm.ai (engine arguments, data parallel deployment, expert parallel deployment).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..checks import choice, whole
from ..formats import BF16, FORMATS, FP8, FP16, FP32, NVFP4
from .answer import Sizing
from .deployment import PAGES
from .spec import ModelSpec


@dataclass(frozen=True)
class Pages:
    """How an engine stores the cache of `model`.

    kind   what a layer with a window holds:
           "exact"    min(n, window) tokens; with a block size, n rounded up to whole blocks
           "grouped"  the blocks that its window can touch, in equal groups of layers over one pool of
                      pages (vLLM's hybrid manager)
           "unified"  every token: one block table for all layers (vLLM without that manager)
    block  tokens per block; 1 for a cache without blocks
    step   tokens that a step may write (vLLM's --max-num-batched-tokens): while a long prompt is read, a
           sliding group holds them beside its window. Used by "grouped" only
    """

    model: ModelSpec
    kind: str = "exact"
    block: int = 1
    step: int = 1

    def __post_init__(self) -> None:
        choice("pages", self.kind, PAGES)
        whole("block_size", self.block, owner="size")
        whole("step_tokens", self.step, owner="size")

    def rounded(self, context: int) -> int:
        """`context` in whole blocks, in tokens."""
        return -(-context // self.block) * self.block

    def slots(self, context: int) -> int:
        """Slots that one sequence of `context` tokens takes, over all layers."""
        model, tokens = self.model, self.rounded(context)
        if self.kind == "unified" or not model.sliding_layers:
            return model.layers * tokens
        if self.kind == "exact":
            return model.full_layers * tokens + model.sliding_layers * min(tokens, model.window)
        layers = group_layers(model.full_layers, model.sliding_layers)
        held = -(-min(model.window - 1 + self.step, context) // self.block) + 1 if context else 0
        blocks = -(-model.full_layers // layers) * (tokens // self.block)
        blocks += -(-model.sliding_layers // layers) * held
        return blocks * layers * self.block

    def most_tokens(self, slots: int) -> int | None:
        """The longest context, in whole blocks, whose cache fits in `slots`; None: any context does."""
        model = self.model
        if self.kind != "grouped" or not model.sliding_layers:
            every = self.kind == "unified" or not model.sliding_layers
            tokens = slots // model.layers
            if not every and tokens >= model.window:
                if not model.full_layers:
                    return None
                tokens = (slots - model.sliding_layers * model.window) // model.full_layers
            return tokens // self.block * self.block
        if not model.full_layers and self.slots(model.window + self.step) <= slots:
            return None
        low, high = 0, 1  # in blocks; `slots` grows with the context
        while self.slots(high * self.block) <= slots:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.slots(middle * self.block) <= slots else (low, middle)
        return low * self.block


def group_layers(full: int, sliding: int) -> int:
    """Layers of a group, for so many layers of each kind.

    >>> group_layers(12, 12), group_layers(10, 52), group_layers(13, 12)
    (12, 10, 13)
    """
    kinds = [n for n in (full, sliding) if n]
    return max(kinds) if max(kinds) < 1.5 * min(kinds) else min(kinds)


VERSION = "0.32.0"
_NEEDS = {NVFP4.name: "needs fp4 units, and older versions have no flag for a nvfp4 cache"}
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
    half = (BF16.name, FP16.name)
    if sizing.compute_dtype == FP16.name and sizing.weights in half:
        parts.append("--dtype float16")
    if sizing.weights == FP8.name:
        parts.append(f"--quantization {FP8.vllm}")
    cache = FORMATS.get(sizing.kv)  # None for a number of bits
    if cache is not None and cache.vllm:
        parts.append(f"--kv-cache-dtype {cache.vllm}")
        if sizing.kv in _NEEDS:
            notes.append(_NEEDS[sizing.kv])
    elif sizing.kv not in half:
        notes.append(f"no flag for a {sizing.kv} cache")
    if sizing.weights not in (*half, FP32.name, FP8.name):
        notes.append(f"CHECKPOINT must be stored as {_bits(sizing.weights)}")
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
