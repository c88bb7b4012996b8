"""A decode step through plain layers by one compiled call, where the user asked for it.

Plain: attention with rotary positions, perhaps with biases, norms of heads or a window, and a gated
feed-forward, each behind one norm (Llama, Mistral, Qwen2 and 3), on a CPU in float32, matrices in int8
perhaps. With anything else, a hook on a module, or a gradient, the step goes module by module as ever.
"""

from collections.abc import Callable

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


def through(blocks: nn.ModuleList, x: Tensor, cache: Cache | None, angles: Callable) -> Tensor | None:
    """x (B, 1, d) through the blocks, the cache filled; None, with nothing done, where modules must do it.

    angles: what makes cos and sin of the rows' positions. Raises ValueError, changing nothing, for a cache
    that is full.
    """
    if choice() != "compiled" or len(x) > ROWS or cache is None or cache.dtype != torch.float32:
        return None
    # A subclass may have changed how it writes.
    if "room" not in vars(type(cache)) or not (layers := [_weights(block) for block in blocks]):
        return None
    if not all(layers) or not _numbers([x]):
        return None
    matrix = layers[0][1]
    if len({_common(block) for block in blocks}) > 1 or any(w[1].dtype != matrix.dtype for w in layers):
        return None
    if (room := cache.room()) is None:
        return None
    cos, sin = angles(room.before)
    rows = x[:, 0].clone()
    addresses = [
        (*(0 if w is None else w.data_ptr() for w in (*weights, k, v)), block.attention.window or 0)
        for block, weights, k, v in zip(blocks, layers, room.k, room.v)
    ]
    layers, spec = np.array(addresses, LAYER), np.array(_common(blocks[0]), SPEC)
    step(rows, layers, matrix, spec, cos, sin, *room.layout, table=room.table, before=room.before)
    cache.filled()
    return rows[:, None]


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
    """Whether these are of one dtype, in one piece on a CPU, and no gradient is asked for."""
    gradient = torch.is_grad_enabled()
    return all(
        t.dtype == dtype and t.is_cpu and t.is_contiguous() and not (gradient and t.requires_grad)
        for t in tensors
    )


def _common(block: Block) -> tuple:
    """What all layers of a step share, in the order of SPEC."""
    attention, ffn, norm = block.attention, block.ffn, block.attention_norm
    scale = attention.scoring.get("softmax_scale", attention.head_dim**-0.5)
    shape = attention.heads, attention.kv_heads, attention.head_dim, ffn.down.shape[1]
    return *shape, GELU[ffn.act], norm.eps, scale * LOG2E
