"""One layer of a decoder: attention and a feed-forward, each behind a norm, added to the residual stream.

Norms divide by the root of the mean square (Zhang and Sennrich 2019); families differ in the weight behind
it. The mean square is taken in float32 whatever the input: 24,926 squared is beyond float16. The feed-forward
is gated, position by position (Shazeer 2020, "GLU variants").

A mixture of experts in its place is `companion.moe.MoE`: w1 (E, 2N, K), gate rows before up rows, and w2 (E,
K, N), for E experts of width N in a stream of width K. Checkpoints hold them expert by expert, or fused;
gpt-oss fused, transposed and with gate and up columns taking turns.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..cost import ModelSpec
from ..moe import MoE, split_interleaved
from .products import Tensors, matrix, product, vector


class Block(nn.Module):
    """One layer: two additions to the residual stream, attention's and the feed-forward's."""

    def __init__(self, attention_norm: nn.Module, attention: nn.Module, ffn_norm: nn.Module, ffn: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.ffn_norm, self.ffn = ffn_norm, ffn

    def forward(self, x, rope, cos, sin, cache=None, lengths=None):
        x = x + self.attention(self.attention_norm(x), rope, cos, sin, cache, lengths)
        return x + self.ffn(self.ffn_norm(x))


class SandwichBlock(Block):
    """The same, with a second norm on what each part adds (Gemma 2 and 3)."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        ffn_norm: nn.Module,
        ffn: nn.Module,
        attention_after: nn.Module,
        ffn_after: nn.Module,
    ):
        super().__init__(attention_norm, attention, ffn_norm, ffn)
        self.attention_after, self.ffn_after = attention_after, ffn_after

    def forward(self, x, rope, cos, sin, cache=None, lengths=None):
        added = self.attention(self.attention_norm(x), rope, cos, sin, cache, lengths)
        x = x + self.attention_after(added)
        return x + self.ffn_after(self.ffn(self.ffn_norm(x)))


_HALVES = (torch.float16, torch.bfloat16)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; 16-bit inputs are rounded before the weight (Llama)."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = vector([weight]), eps

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        if x.dtype in _HALVES:
            return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class WideRMSNorm(RMSNorm):
    """The same, with 16-bit inputs rounded behind the weight (gpt-oss)."""

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        if x.dtype in _HALVES:
            return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight): a stored weight of zero leaves the norm alone (Gemma)."""

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        if x.dtype in _HALVES:
            return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], 1.0 + self.weight, self.eps)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu_pytorch_tanh": gelu_tanh,
}


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one matrix, gate rows before up rows.

    d, width: of the residual stream and between the matrices. act: one of ACTIVATIONS.
    """

    def __init__(self, take: Tensors, d: int, width: int, act: str = "silu", bias: bool = False):
        super().__init__()
        names = ["gate_proj", "up_proj"]
        self.act = ACTIVATIONS[act]
        self.gate_up = matrix([take(f"{n}.weight", width, d) for n in names])
        self.gate_up_bias = vector([take(f"{n}.bias", width) for n in names]) if bias else None
        self.down = matrix([take("down_proj.weight", d, width)])
        self.down_bias = vector([take("down_proj.bias", d)]) if bias else None

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        gate, up = product(x, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return product(self.act(gate) * up, self.down, self.down_bias)


class ExpertWeights(NamedTuple):
    """w1 (E, 2N, K), w2 (E, K, N), and their biases (E, 2N) and (E, K) or None."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None


def separate(take: Tensors, experts: int, width: int, d: int) -> ExpertWeights:
    """gate_proj, up_proj and down_proj of each expert, or gate_up_proj and down_proj of all."""
    if "experts.gate_up_proj" in take:
        w1 = take("experts.gate_up_proj", experts, 2 * width, d).clone()
        return ExpertWeights(w1, take("experts.down_proj", experts, d, width).clone())
    return _stacked(take, experts, width, d, "gate_proj", "up_proj", "down_proj")


def mixtral(take: Tensors, experts: int, width: int, d: int) -> ExpertWeights:
    """Mixtral's own files call gate, up and down w1, w3 and w2."""
    if "experts.0.w1.weight" in take:
        return _stacked(take, experts, width, d, "w1", "w3", "w2")
    return separate(take, experts, width, d)


def interleaved(take: Tensors, experts: int, width: int, d: int) -> ExpertWeights:
    """gpt-oss: (E, K, 2N) with gate in the even columns and up in the odd ones, (E, N, K), and biases."""
    if "experts.gate_up_proj_blocks" in take:
        raise ValueError(
            f"{take.owner}: experts are stored in mxfp4, which is not read; convert to bf16 first"
        )
    w1 = take("experts.gate_up_proj", experts, d, 2 * width)
    b1 = take("experts.gate_up_proj_bias", experts, 2 * width)
    return ExpertWeights(
        split_interleaved(w1, -1).mT.contiguous(),
        take("experts.down_proj", experts, width, d).mT.clone(memory_format=torch.contiguous_format),
        split_interleaved(b1, -1),
        take("experts.down_proj_bias", experts, d).clone(),
    )


def _stacked(take: Tensors, experts: int, width: int, d: int, gate: str, up: str, down: str) -> ExpertWeights:
    """One expert at a time into its place, so that a large model is never in memory twice."""
    w1 = w2 = None
    for e in range(experts):
        part = take(f"experts.{e}.{gate}.weight", width, d)
        if w1 is None:
            w1, w2 = part.new_empty(experts, 2 * width, d), part.new_empty(experts, d, width)
        w1[e, :width] = part
        w1[e, width:] = take(f"experts.{e}.{up}.weight", width, d)
        w2[e] = take(f"experts.{e}.{down}.weight", d, width)
    return ExpertWeights(w1, w2)


def mixture(
    spec: ModelSpec,
    take: Tensors,
    experts: Callable[[Tensors, int, int, int], ExpertWeights],
    places: Sequence[str] = ("mlp.",),
    router: str = "gate.",
) -> MoE:
    """The routed and shared experts of one layer, whose tensors are `take`.

    experts: how the experts' matrices are read. places: prefixes below which a mixture may lie; the first
    that has a router counts. router: the router's prefix below that.

    The router's bias and correction are kept in float32 at least. Raises ValueError for a tensor that is
    missing or misshapen.
    """
    m, d = spec.moe, spec.d_model
    place = next((p for p in places if f"{p}{router}weight" in take), places[0])
    take = take.under(place)
    gate = take.under(router)
    w1, w2, b1, b2 = experts(take, m.experts, m.ffn, d)
    exact = torch.promote_types(w1.dtype, torch.float32)
    state = {"router": gate("weight", m.experts, d).clone(), "w1": w1, "w2": w2}
    if m.router_bias:
        state["router_bias"] = gate("bias", m.experts).to(exact).clone()
    if m.correction_bias:
        state["correction_bias"] = gate("e_score_correction_bias", m.experts).to(exact).clone()
    if b1 is not None:
        state |= {"b1": b1, "b2": b2}
    if m.shared:
        shared = take.under("shared_experts.")
        names = ("gate_proj.weight", "up_proj.weight")
        state["shared_w1"] = torch.cat([shared(n, m.shared_ffn, d) for n in names])
        state["shared_w2"] = shared("down_proj.weight", d, m.shared_ffn).clone()
    layer = MoE.from_spec(spec, dtype=w1.dtype, device="meta")  # no memory before the tensors are there
    layer.load_state_dict(state, assign=True)
    return layer.requires_grad_(False)
