"""A decode step through plain layers by one compiled call, where the user asked for it.

Plain: attention with rotary positions, perhaps with biases, norms of heads or a window, and a gated
feed-forward, each behind one norm (Llama, Mistral, Qwen2 and 3), on a CPU in float32, matrices in int8
perhaps. With anything else, a hook on a module, or a gradient, the step goes module by module as ever.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ..caches.base import Cache
from ..kernels.cpu import LOG2E
from ..kernels.cpu_rows import LAYER, ROWS, SPEC, step
from ..kernels.policy import choice
from .attention import Attention, HeadNormAttention
from .blocks import Block
from .feedforward import ACTIVATIONS, FeedForward
from .int8 import Int8Matrix
from .norms import RMSNorm

GELU = {ACTIVATIONS["silu"]: False, ACTIVATIONS["gelu_pytorch_tanh"]: True}
_known: WeakKeyDictionary[nn.ModuleList, "Layers"] = WeakKeyDictionary()


def through(blocks: nn.ModuleList, x: Tensor, cache: Cache | None, angles: Callable) -> Tensor | None:
    """x (B, 1, d) through the blocks, the cache filled; None, with nothing done, where modules must do it.

    angles: what makes cos and sin of the rows' positions. Raises ValueError, changing nothing, for a cache
    that is full.
    """
    if choice() != "compiled" or len(x) > ROWS or cache is None:
        return None
    if cache.dtype != torch.float32 or cache.device.type != "cpu":
        return None
    # A subclass may have changed how it writes.
    if "room" not in vars(type(cache)) or not _numbers([x]) or (layers := _layers(blocks)) is None:
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *layers.tensors)):
        return None
    if (room := cache.room()) is None:
        return None
    table = layers.table.copy()
    table["k"], table["v"] = ([store.data_ptr() for store in stores] for stores in (room.k, room.v))
    rows = x[:, 0].clone()
    step(rows, table, layers.matrix, layers.spec, *angles(room.before), *room.layout, room.table, room.before)
    cache.filled()
    return rows[:, None]


def _layers(blocks: nn.ModuleList) -> "Layers | None":
    """What is known of the blocks, taken anew if anything about them has changed; None if not plain."""
    found = _known.get(blocks)
    if found is not None and found.seen == found.look():
        return found
    _known.pop(blocks, None)
    weights = []
    for block in blocks:
        if (own := _weights(block)) is None:
            return None
        weights.append(own)
    if not weights:
        return None
    found = Layers(blocks, weights)
    if len(set(found.seen[1])) > 1 or len({w[1].dtype for w in weights}) > 1:
        return None
    _known[blocks] = found
    return found


class Layers:
    """Plain layers as a compiled step wants them: looking at every module anew would take a tenth of a step.

    `table` (L,) of LAYER, `spec` of SPEC, `matrix` one of the matrices, `tensors` all of them.
    """

    def __init__(self, blocks: nn.ModuleList, weights: list[tuple[Tensor | None, ...]]):
        self.modules = list(blocks.modules())
        self.parts = [(b.attention, b.ffn, b.attention_norm, b.ffn_norm) for b in blocks]
        self.tensors = [t for own in weights for t in own if t is not None]
        self.matrix = weights[0][1]
        self.seen = self.look()
        addresses = [
            (*(0 if t is None else t.data_ptr() for t in own), 0, 0, attention.window or 0)
            for own, (attention, *_) in zip(weights, self.parts)
        ]
        self.table = np.array(addresses, LAYER)
        self.spec = np.array(self.seen[1][0], SPEC)

    def look(self) -> tuple[list, ...]:
        """What must not have changed: modules, parameters and hooks, numbers, and the tensors' memory."""
        return (
            [
                (*map(id, m._modules.values()), *map(id, m._parameters.values()), len(m._forward_hooks))
                + (len(m._forward_pre_hooks),)
                for m in self.modules
            ],
            [_common(*parts) for parts in self.parts],
            [(attention.window, *attention.scoring.items()) for attention, *_ in self.parts],
            [(t.data_ptr(), t.dtype) for t in self.tensors],
        )


def _weights(block: nn.Module) -> tuple[Tensor | None, ...] | None:
    """A plain layer's weights in the order of LAYER, or None."""
    if type(block) is not Block:
        return None
    attention, ffn = block.attention, block.ffn
    norms = [block.attention_norm, block.ffn_norm]
    if type(attention) not in (Attention, HeadNormAttention) or type(ffn) is not FeedForward:
        return None
    heads = [None, None]
    if type(attention) is HeadNormAttention:
        norms += [attention.q_norm, attention.k_norm]
        heads = [attention.q_norm.weight, attention.k_norm.weight]
    if attention.sinks is not None or "softcap" in attention.scoring or ffn.act not in GELU:
        return None
    if attention.o_bias is not None or ffn.gate_up_bias is not None or ffn.down_bias is not None:
        return None
    if any(type(n) is not RMSNorm for n in norms):
        return None
    matrices = attention.qkv, attention.o, ffn.gate_up, ffn.down
    codes = [m for m in matrices if isinstance(m, Int8Matrix)]
    if any(m._forward_hooks or m._forward_pre_hooks for m in (block, attention, ffn, *norms, *codes)):
        return None
    if codes and len(codes) < len(matrices):
        return None
    if codes:
        matrices = tuple(m.codes for m in matrices)
    (qkv, o, gate_up, down), scales = matrices, [m.scale for m in codes] or [None] * 4
    vectors = block.attention_norm.weight, attention.qkv_bias, *heads, block.ffn_norm.weight, *scales
    if not _numbers(list(matrices), torch.int8 if codes else torch.float32):
        return None
    if not _numbers([v for v in vectors if v is not None]):
        return None
    norm, bias, q_norm, k_norm, ffn_norm, *_ = vectors
    return (
        norm, qkv, scales[0], bias, q_norm, k_norm, o, scales[1],
        ffn_norm, gate_up, scales[2], down, scales[3],
    )  # fmt: skip


def _numbers(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> bool:
    """Whether these are of one dtype, in one piece, on a CPU."""
    return all(t.dtype == dtype and t.is_cpu and t.is_contiguous() for t in tensors)


def _common(attention: Attention, ffn: FeedForward, norm: RMSNorm, other: RMSNorm) -> tuple:
    """What all layers of a step share, in the order of SPEC; nothing if they couldn't."""
    if norm.eps != other.eps:
        return ()
    scale = attention.scoring.get("softmax_scale", attention.head_dim**-0.5)
    shape = attention.heads, attention.kv_heads, attention.head_dim, ffn.down.shape[1]
    return *shape, GELU.get(ffn.act), norm.eps, scale * LOG2E
