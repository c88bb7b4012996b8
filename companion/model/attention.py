"""Attention with shared key-value heads: project, rotate, remember, look up, project back.

Weights have F.linear's shape (out, in). What is fused is fused for one reason: a decode step is 30 layers of
one-row products, and three products that read the same row cost three launches where one will do.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..attention import sdpa
from ..caches import Cache
from ..cost import ModelSpec
from ..rope import Rope
from .norms import RMSNorm
from .products import matrix, product
from .tensors import Tensors, vector

Number = int | float


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (Ainslie et al. 2023).

    softmax_scale: factor on the scores; None means head_dim ** -0.5. softcap: bound on the scores, 0 for none
    (Gemma 2). spec.sinks: one logit per head that joins the softmax's denominator (gpt-oss). A layer of type
    "sliding" sees the last spec.window tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        take: Tensors,
        norm: type[RMSNorm] = RMSNorm,
        *,
        softmax_scale: Number | None = None,
        softcap: Number = 0.0,
    ):
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, spec.heads, spec.kv_heads, spec.head_dim
        self.window = spec.window if spec.layer_types[layer] == "sliding" else None
        d, D = spec.d_model, spec.head_dim
        rows = {"q_proj": self.heads * D, "k_proj": self.kv_heads * D, "v_proj": self.kv_heads * D}
        self.qkv = matrix([take(f"{n}.weight", size, d) for n, size in rows.items()])
        self.qkv_bias = None
        if spec.qkv_bias:
            self.qkv_bias = vector([take(f"{n}.bias", size) for n, size in rows.items()])
        self.o = matrix([take("o_proj.weight", d, self.heads * D)])
        self.o_bias = vector([take("o_proj.bias", d)]) if spec.o_bias else None
        self.sinks = vector([take("sinks", self.heads)]) if spec.sinks else None
        self.scoring = {"softmax_scale": softmax_scale} if softmax_scale is not None else {}
        if softcap:
            self.scoring["softcap"] = softcap

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
        qk, v = self.prepared(*heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1))
        q, k = rope.apply(qk, cos, sin).split([self.heads, self.kv_heads], dim=1)  # (B, H, S, D)
        if cache is None:
            out = self.within(q, k, v)
        else:
            cache.append(self.layer, k, v, lengths=lengths)
            out = cache.attend(self.layer, q, **self.options())
        return product(out.transpose(1, 2).reshape(B, S, -1), self.o, self.o_bias)

    def prepared(self, qk: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What happens between projection and rotation; qk (B, Hq + Hkv, S, D), v (B, Hkv, S, D)."""
        return qk, v

    def options(self) -> dict:
        """How scores are made, as options of `cache.attend` and `sdpa`."""
        return self.scoring if self.sinks is None else {**self.scoring, "sinks": self.sinks}

    def within(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention among the S tokens of this call alone."""
        S, options = q.shape[2], self.options()
        windowed = self.window is not None and S > self.window
        if windowed or "sinks" in options or "softcap" in options:
            window = (self.window - 1, 0) if windowed else (-1, -1)
            return sdpa(q, k, v, causal=True, window_size=window, **options)
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=S > 1, enable_gqa=True, scale=options.get("softmax_scale")
        )


class HeadNormAttention(Attention):
    """Queries and keys are normed head by head before they are rotated (Qwen3, Gemma 3, GLM-4.5)."""

    def __init__(self, spec: ModelSpec, layer: int, take: Tensors, norm: type[RMSNorm] = RMSNorm, **scoring):
        super().__init__(spec, layer, take, norm, **scoring)
        self.q_norm = norm(take("q_norm.weight", spec.head_dim), spec.norm_eps)
        self.k_norm = norm(take("k_norm.weight", spec.head_dim), spec.norm_eps)

    def prepared(self, qk, v):
        q, k = qk.split([self.heads, self.kv_heads], dim=1)
        return torch.cat([self.q_norm(q), self.k_norm(k)], dim=1), v


class WidthNormAttention(Attention):
    """All query heads are normed as one vector, all key heads as another (OLMoE).

    clip: bound on queries, keys and values behind the norms, or None.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        take: Tensors,
        norm: type[RMSNorm] = RMSNorm,
        *,
        clip: Number | None = None,
        **scoring,
    ):
        super().__init__(spec, layer, take, norm, **scoring)
        self.q_norm = norm(take("q_norm.weight", spec.heads * spec.head_dim), spec.norm_eps)
        self.k_norm = norm(take("k_norm.weight", spec.kv_heads * spec.head_dim), spec.norm_eps)
        self.clip = clip

    def prepared(self, qk, v):
        qk, B, S = qk.transpose(1, 2), qk.shape[0], qk.shape[2]
        q, k = qk.split([self.heads, self.kv_heads], dim=2)
        qk = torch.cat([self.q_norm(q.flatten(2)), self.k_norm(k.flatten(2))], dim=-1)
        qk = qk.view(B, S, -1, self.head_dim).transpose(1, 2)
        if self.clip is None:
            return qk, v
        return qk.clamp(-self.clip, self.clip), v.clamp(-self.clip, self.clip)
