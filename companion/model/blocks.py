"""The parts of a decoder layer: norm, attention, feed-forward. Weights have F.linear's shape (out, in).

What is fused is fused for one reason: a decode step is 30 layers of one-row products, and three products that
read the same row cost three launches where one will do.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..attention import sdpa
from ..caches import Cache
from ..cost import ModelSpec
from ..rope import Rope
from .products import matrix, product

Take = Callable[[str], Tensor]  # name of a tensor -> the tensor


def vector(parts: list[Tensor]) -> nn.Parameter:
    """Concatenate vectors (norm weights, biases) into one parameter of its own memory."""
    return nn.Parameter(torch.cat(parts).detach().clone(), requires_grad=False)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, mean square in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = vector([weight]), eps

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        if x.dtype in (torch.float16, torch.bfloat16):  # 24,926 squared is beyond float16
            return (F.rms_norm(x.float(), x.shape[-1:], None, self.eps)).to(x.dtype) * self.weight
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions: project, rotate, remember, look up, project back."""

    def __init__(self, spec: ModelSpec, layer: int, take: Take):
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, spec.heads, spec.kv_heads, spec.head_dim
        self.window = spec.window if spec.layer_types[layer] == "sliding" else None
        names = [f"self_attn.{p}_proj" for p in "qkv"]
        self.qkv = matrix([take(f"{n}.weight") for n in names])
        self.qkv_bias = vector([take(f"{n}.bias") for n in names]) if spec.qkv_bias else None
        self.o = matrix([take("self_attn.o_proj.weight")])
        self.o_bias = vector([take("self_attn.o_proj.bias")]) if spec.o_bias else None
        self.q_norm = self.k_norm = None
        if spec.qk_norm == "head":
            self.q_norm = RMSNorm(take("self_attn.q_norm.weight"), spec.norm_eps)
            self.k_norm = RMSNorm(take("self_attn.k_norm.weight"), spec.norm_eps)

    def forward(
        self,
        x: Float[Tensor, "B S d"],
        rope: Rope,
        cos: Float[Tensor, "*rows half"],
        sin: Float[Tensor, "*rows half"],
        cache: Cache | None = None,
        lengths: list[int] | None = None,
    ) -> Float[Tensor, "B S d"]:
        B, S, _ = x.shape
        heads = product(x, self.qkv, self.qkv_bias).view(B, S, -1, self.head_dim).transpose(1, 2)
        qk, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)  # (B, H, S, D)
        if self.q_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], dim=1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        q, k = rope.apply(qk, cos, sin).split([self.heads, self.kv_heads], dim=1)
        if cache is None:
            out = self.within(q, k, v)
        else:
            cache.append(self.layer, k, v, lengths=lengths)
            out = cache.attend(self.layer, q)
        return product(out.transpose(1, 2).reshape(B, S, -1), self.o, self.o_bias)

    def within(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention among the S tokens of this call alone."""
        S = q.shape[2]
        if self.window is not None and S > self.window:
            return sdpa(q, k, v, causal=True, window_size=(self.window - 1, 0))
        return F.scaled_dot_product_attention(q, k, v, is_causal=S > 1, enable_gqa=True)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), position by position (Shazeer 2020, "GLU variants")."""

    def __init__(self, spec: ModelSpec, take: Take):
        super().__init__()
        names = ["mlp.gate_proj", "mlp.up_proj"]
        self.gate_up = matrix([take(f"{n}.weight") for n in names])
        self.gate_up_bias = vector([take(f"{n}.bias") for n in names]) if spec.mlp_bias else None
        self.down = matrix([take("mlp.down_proj.weight")])
        self.down_bias = vector([take("mlp.down_proj.bias")]) if spec.mlp_bias else None

    def forward(self, x: Float[Tensor, "B S d"]) -> Float[Tensor, "B S d"]:
        gate, up = product(x, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return product(F.silu(gate) * up, self.down, self.down_bias)


class Block(nn.Module):
    """One layer: two additions to the residual stream, attention's and the feed-forward's."""

    def __init__(self, spec: ModelSpec, layer: int, take: Take):
        super().__init__()
        self.attention_norm = RMSNorm(take("input_layernorm.weight"), spec.norm_eps)
        self.attention = Attention(spec, layer, take)
        self.ffn_norm = RMSNorm(take("post_attention_layernorm.weight"), spec.norm_eps)
        self.ffn = FeedForward(spec, take)

    def forward(self, x, rope, cos, sin, cache=None, lengths=None):
        x = x + self.attention(self.attention_norm(x), rope, cos, sin, cache, lengths)
        return x + self.ffn(self.ffn_norm(x))
