"""A decode step through plain layers by one compiled call, where the user asked for it.

Plain: attention with rotary positions, perhaps with biases, norms of heads or a window, and a gated
feed-forward, each behind one norm (Llama, Mistral, Qwen2 and 3), on a CPU in float32, matrices in int8
perhaps. With anything else, a hook on a module, or a gradient, the step goes module by module as ever.
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ..caches.base import Attendable, Room
from ..kernels.cpu import LAYER, LOG2E, ROWS, SPEC, step
from .attention import Attention, HeadNormAttention
from .blocks import ACTIVATIONS, Block, FeedForward, RMSNorm
from .products import Int8Matrix

GELU = {ACTIVATIONS["silu"]: False, ACTIVATIONS["gelu_pytorch_tanh"]: True}
_known: WeakKeyDictionary[nn.ModuleList, "CompiledLayers"] = WeakKeyDictionary()


def suits(x: Tensor, cache: Attendable | None) -> bool:
    """Whether a step of rows x (B, 1, d) over this cache could be one call, if the layers are plain."""
    if cache is None or len(x) > ROWS or cache.dtype != torch.float32 or cache.device.type != "cpu":
        return False
    # A subclass may have changed how it writes.
    return "room" in vars(type(cache)) and _numbers([x])


def compiled_layers(blocks: nn.ModuleList) -> "CompiledLayers":
    """The blocks as one call, as they are now: taken anew if anything about them has changed."""
    found = _known.get(blocks)
    if found is None or found.why_not is not None or found.seen != found.look():
        _known.pop(blocks, None)
        found = _known[blocks] = CompiledLayers(blocks)
    return found


class CompiledLayers:
    """Plain layers as one compiled call: looking at every module anew would take a tenth of a step.

    Attributes: `why_not`, what keeps them with the modules, or None for plain layers. Of those: `table` (L,)
    of LAYER, `spec` of SPEC, `matrix`, one of the matrices, and `tensors`, all of them.
    """

    def __init__(self, blocks: nn.ModuleList):
        self.why_not, weights = None, []
        for i, block in enumerate(blocks):
            if (own := _weights(block)) is None:
                self.why_not = f"layer {i} is not plain"
                return
            weights.append(own)
        alike = {(own["qkv"].dtype, *_common(*_parts(block))) for block, own in zip(blocks, weights)}
        if len(alike) != 1:
            self.why_not = "the layers differ"
            return
        self.modules = list(blocks.modules())
        self.parts = [_parts(block) for block in blocks]
        self.tensors = [t for own in weights for t in own.values()]
        self.matrix = weights[0]["qkv"]
        self.table, self.spec = np.zeros(len(blocks), LAYER), np.array(_common(*self.parts[0]), SPEC)
        for row, own, (attention, *_) in zip(self.table, weights, self.parts):
            row["window"] = attention.window or 0
            for name, t in own.items():
                row[name] = t.data_ptr()
        self.seen = self.look()

    def __repr__(self) -> str:
        if self.why_not is not None:
            return f"CompiledLayers(none: {self.why_not})"
        return f"CompiledLayers({len(self.table)} layers, {str(self.matrix.dtype).removeprefix('torch.')})"

    def takes(self, x: Tensor) -> bool:
        """Whether they are plain, and no gradient is asked for."""
        if self.why_not is not None:
            return False
        return not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, *self.tensors)))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Attendable, room: Room) -> Tensor:
        """x (B, 1, d) through all layers, the cache's room filled.

        cos, sin: of the rows' positions, (B, 1, half), or (1, half) for all.
        """
        table = self.table.copy()
        table["k"], table["v"] = ([store.data_ptr() for store in stores] for stores in (room.k, room.v))
        rows, angles = x[:, 0].clone(), (t.view(-1, t.shape[-1]) for t in (cos, sin))
        step(rows, table, self.matrix, self.spec, *angles, *room.layout, room.table, room.before)
        cache.filled()
        return rows[:, None]

    def look(self) -> tuple[list, ...]:
        """What must not have changed: modules, parameters and hooks, numbers, and the tensors' memory."""
        return (
            [
                (
                    *map(id, m._modules.values()),
                    *map(id, m._parameters.values()),
                    len(m._forward_hooks),
                    len(m._forward_pre_hooks),
                )
                for m in self.modules
            ],
            [m.eps for m in self.modules if isinstance(m, RMSNorm)],
            [(_common(*parts), parts[0].window, *parts[0].scoring.items()) for parts in self.parts],
            [(t.data_ptr(), t.dtype) for t in self.tensors],
        )


def _weights(block: nn.Module) -> dict[str, Tensor] | None:
    """What a plain layer has of LAYER's weights, or None if it isn't plain."""
    if type(block) is not Block:
        return None
    attention, ffn = block.attention, block.ffn
    if type(attention) not in (Attention, HeadNormAttention) or type(ffn) is not FeedForward:
        return None
    if attention.sinks is not None or "softcap" in attention.scoring or ffn.act not in GELU:
        return None
    if attention.o_bias is not None or ffn.gate_up_bias is not None or ffn.down_bias is not None:
        return None
    norms = {"attention_norm": block.attention_norm, "ffn_norm": block.ffn_norm}
    if type(attention) is HeadNormAttention:
        norms |= {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
    if any(type(n) is not RMSNorm or n.eps != block.attention_norm.eps for n in norms.values()):
        return None
    if any(m._forward_hooks or m._forward_pre_hooks for m in block.modules()):
        return None
    matrices = {"qkv": attention.qkv, "o": attention.o, "gate_up": ffn.gate_up, "down": ffn.down}
    vectors = {name: n.weight for name, n in norms.items()}
    if attention.qkv_bias is not None:
        vectors["qkv_bias"] = attention.qkv_bias
    dtype = torch.float32
    if all(isinstance(m, Int8Matrix) for m in matrices.values()):
        dtype = torch.int8
        vectors |= {f"{name}_scale": m.scale for name, m in matrices.items()}
        matrices = {name: m.codes for name, m in matrices.items()}
    if any(isinstance(m, Int8Matrix) for m in matrices.values()):  # some, and not all
        return None
    return matrices | vectors if _numbers(matrices.values(), dtype) and _numbers(vectors.values()) else None


def _numbers(tensors: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> bool:
    """Whether these are of one dtype, in one piece, on a CPU."""
    return all(t.dtype == dtype and t.is_cpu and t.is_contiguous() for t in tensors)


def _parts(block: Block) -> tuple[Attention, FeedForward, RMSNorm]:
    return block.attention, block.ffn, block.attention_norm


def _common(attention: Attention, ffn: FeedForward, norm: RMSNorm) -> tuple:
    """What all layers of a step share, in the order of SPEC."""
    scale = attention.scoring.get("softmax_scale", attention.head_dim**-0.5)
    shape = attention.heads, attention.kv_heads, attention.head_dim, ffn.down.shape[1]
    return *shape, GELU.get(ffn.act), norm.eps, scale * LOG2E
