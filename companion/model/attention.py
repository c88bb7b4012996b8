"""Attention with shared key-value heads: project, rotate, remember, look up, project back.

Weights have F.linear's shape (out, in). What is fused is fused for one reason: a decode step is 30 layers of
one-row products, and three products that read the same row cost three launches where one will do.

Multi-head latent attention: one vector of kv_rank + rope_dim numbers per token instead of keys and values.

A token's latent is projected up to a key and a value for every head. The projection of keys can as well be
applied to the query, and that of values to the result ("absorbed"), since both are linear:

    q . (W_k c) = (W_k^T q) . c          sum_j p_j (W_v c_j) = W_v (sum_j p_j c_j)

so over a cache all heads attend to the latents themselves, as one shared head. Positions do not pass through
a projection: rope_dim numbers beside the latent carry them, rotated, for all heads.
Source: DeepSeek-V2 report (arXiv 2405.04434), sections 2.1.2 and 2.1.3, appendix C.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..attention import sdpa
from ..caches import Attendable
from ..cost import ModelSpec
from ..rope import Rope
from .blocks import RMSNorm
from .products import Int8Matrix, Tensors, matrix, product, vector

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
        cache: Attendable | None = None,
        lengths: list[int] | None = None,
    ) -> Float[Tensor, "B S d"]:
        B, S, _ = x.shape
        heads = product(x, self.qkv, self.qkv_bias).view(B, S, -1, self.head_dim).transpose(1, 2)
        qk, v = self.prepared(*heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1))
        q, k = rope.apply_rope(qk, cos, sin).split([self.heads, self.kv_heads], dim=1)  # (B, H, S, D)
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


INNER_EPS = 1e-6  # of the two norms in here; the published code does not read it from the configuration


class LatentAttention(nn.Module):
    """Latent attention; expanded to heads within one call, absorbed over a cache of kind "latent".

    softmax_scale: factor on the scores; None means qk_dim ** -0.5, the width of one head before absorption.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        take: Tensors,
        norm: type[RMSNorm] = RMSNorm,
        *,
        softmax_scale: Number | None = None,
    ):
        super().__init__()
        m, d, H = spec.mla, spec.d_model, spec.heads
        self.layer, self.heads, self.mla = layer, H, m
        self.softmax_scale = m.qk_dim**-0.5 if softmax_scale is None else softmax_scale
        # What reads the residual stream, in one matrix: the query's rank (or the query), then the latent.
        first, rows = ("q_a_proj", m.q_rank) if m.q_rank else ("q_proj", H * m.qk_dim)
        self.down_sizes = [rows, m.kv_rank, m.rope_dim]
        latent = take("kv_a_proj_with_mqa.weight", m.width, d)
        self.down = matrix([take(f"{first}.weight", rows, d), latent])
        self.q_norm = self.q_up = self.down_bias = None
        if m.q_rank:
            self.q_norm = norm(take("q_a_layernorm.weight", m.q_rank), INNER_EPS)
            self.q_up = matrix([take("q_b_proj.weight", H * m.qk_dim, m.q_rank)])
        if spec.qkv_bias:  # on what leads to a rank; a query projected directly has none
            biases = [take("q_a_proj.bias", m.q_rank)] if m.q_rank else []
            self.down_bias = vector([*biases, take("kv_a_proj_with_mqa.bias", m.width)])
        self.kv_norm = norm(take("kv_a_layernorm.weight", m.kv_rank), INNER_EPS)
        up = take("kv_b_proj.weight", H * (m.nope_dim + m.v_dim), m.kv_rank).view(H, -1, m.kv_rank)
        k_up, v_up = up.split([m.nope_dim, m.v_dim], dim=1)
        self.k_up = nn.Parameter(k_up.contiguous().clone(), requires_grad=False)  # (H, nope, kv_rank)
        self.v_up = nn.Parameter(v_up.contiguous().clone(), requires_grad=False)  # (H, v, kv_rank)
        self.o = matrix([take("o_proj.weight", d, H * m.v_dim)])
        self.o_bias = vector([take("o_proj.bias", d)]) if spec.o_bias else None

    def forward(
        self,
        x: Float[Tensor, "B S d"],
        rope: Rope,
        cos: Float[Tensor, "*rows half"],
        sin: Float[Tensor, "*rows half"],
        cache: Attendable | None = None,
        lengths: list[int] | None = None,
    ) -> Float[Tensor, "B S d"]:
        B, S, _ = x.shape
        q, latent, shared = product(x, self.down, self._bias()).split(self.down_sizes, dim=-1)
        if self.q_up is not None:
            q = product(self.q_norm(q), self.q_up)
        q = q.reshape(B, S, self.heads, -1).transpose(1, 2)  # (B, H, S, nope + rope)
        nope, turning = q.split([self.mla.nope_dim, self.mla.rope_dim], dim=-1)
        turning, shared = rope.apply_rope(turning, cos, sin), rope.apply_rope(shared[:, None], cos, sin)
        latent = torch.cat([self.kv_norm(latent)[:, None], shared], dim=-1)  # (B, 1, S, kv_rank + rope)
        if cache is None:
            out = self.within(torch.cat([nope, turning], dim=-1), latent)
        else:
            cache.append(self.layer, latent, None, lengths=lengths)
            q = torch.cat([nope @ _dense(self.k_up, x), turning], dim=-1)  # into the latent's space
            out = cache.attend(self.layer, q, softmax_scale=self.softmax_scale) @ _dense(self.v_up, x).mT
        return product(out.transpose(1, 2).reshape(B, S, -1), self.o, self.o_bias)

    def _bias(self) -> Tensor | None:
        if self.down_bias is None or self.q_up is not None:
            return self.down_bias
        return F.pad(self.down_bias, (self.down_sizes[0], 0))

    def within(self, q: Tensor, latent: Tensor) -> Tensor:
        """Causal attention among the S tokens of this call, with a key and a value for every head.

        For many tokens at once this is cheaper than the absorbed form: 128 + 64 numbers to a score in
        DeepSeek-V3 instead of 512 + 64.
        """
        c, shared = latent.split([self.mla.kv_rank, self.mla.rope_dim], dim=-1)
        k = torch.cat([c @ _dense(self.k_up, c).mT, shared.expand(-1, self.heads, -1, -1)], dim=-1)
        return F.scaled_dot_product_attention(
            q, k, c @ _dense(self.v_up, c).mT, is_causal=q.shape[2] > 1, scale=self.softmax_scale
        )


def _dense(weight: Tensor | Int8Matrix, like: Tensor) -> Tensor:
    """A projection of all heads as numbers: both ways through it are products of a batch of matrices."""
    return weight.dense(like.dtype) if isinstance(weight, Int8Matrix) else weight
