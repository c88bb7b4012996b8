"""The mixture-of-experts layer: router, routed experts, shared experts.

logits = x W_r + b_r  ->  route  ->  dispatch  ->  grouped experts  ->  combine  (+ shared experts, maybe
gated)
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from ..checks import positive, whole
from ..cost import ModelSpec, RoutingSpec
from .dispatch import capacity_of
from .experts import gated, grouped_experts, grouped_linear
from .route import Load, load, route, scored, updated_bias


@dataclass(frozen=True)
class Routing:
    """What the router said, for statistics and the auxiliary loss.

    logits (T, E) float32 (or float64), weights (T, k) of the same dtype, ids (T, k) int64: -1 where a token
    was masked out; T = all positions of the input, flattened.
    score: the rule's.
    """

    logits: Float[Tensor, "T E"]
    weights: Float[Tensor, "T k"]
    ids: Int64[Tensor, "T k"]
    score: str

    @property
    def probs(self) -> Float[Tensor, "T E"]:
        """(T, E) rows that sum to 1, for `aux_loss`: softmax, or sigmoids over their sum (DeepSeek-V3)."""
        if self.score != "sigmoid":
            return torch.softmax(self.logits, dim=-1)
        scores = scored(self.logits, "sigmoid")
        return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)

    @property
    def load(self) -> Load:
        """Tokens per expert, and how even that is."""
        return load(self.ids, self.logits.shape[1])


class MoE(nn.Module):
    """x (..., K) -> (..., K): every position through `top_k` of `experts` feed-forwards of width `ffn`.

    d_model, ffn: K, and N of each routed expert. experts, top_k: E and k. routing: the rule (see `route`).
    shared_ffn: width of the always-on expert, 0 for none; several are one of their summed width.
    shared_gate: its output times sigmoid(x . g), as in Qwen2-MoE.
    router_bias, expert_bias, correction_bias: which vectors exist beside the matrices.
    swiglu_limit, swiglu_alpha: gpt-oss's activation; a limit of None is silu(gate) * up.
    capacity_factor: None keeps every token; else an expert takes ceil(factor * T k / E) at most, the first.
    dtype, device: of the weights. The router's product is made in float32 (or float64) whatever the dtype: in
        bfloat16 two experts tie that are not equal. Its bias and the correction are kept in that type too.

    Parameters, as in the state dict (None where absent):

        router (E, K)         router_bias (E,)        correction_bias (E,), a buffer
        w1 (E, 2N, K) gate rows before up rows        b1 (E, 2N)
        w2 (E, K, N)                                  b2 (E, K)
        shared_w1 (2Ns, K)    shared_w2 (K, Ns)       shared_gate (1, K)

    To load a checkpoint without filling the memory first: `MoE(..., device="meta")`, then
    `load_state_dict(..., assign=True)`.

    Raises ValueError, naming the argument, for sizes and rules that contradict each other.
    """

    def __init__(
        self,
        d_model: int,
        ffn: int,
        experts: int,
        top_k: int,
        *,
        routing: RoutingSpec = RoutingSpec(),  # noqa: B008  (frozen)
        shared_ffn: int = 0,
        shared_gate: bool = False,
        router_bias: bool = False,
        expert_bias: bool = False,
        correction_bias: bool = False,
        swiglu_limit: float | None = None,
        swiglu_alpha: float = 1.702,
        capacity_factor: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        for name, value in (("d_model", d_model), ("ffn", ffn), ("experts", experts)):
            whole(name, value)
        whole("shared_ffn", shared_ffn, 1 if shared_gate else 0)
        routing.check(experts, top_k)
        if swiglu_limit is not None:
            positive("swiglu_limit", swiglu_limit)
        if capacity_factor is not None:
            capacity_of(1, experts, top_k, capacity_factor)
        self.d_model, self.ffn, self.experts, self.top_k, self.routing = d_model, ffn, experts, top_k, routing
        self.swiglu_limit, self.swiglu_alpha = swiglu_limit, swiglu_alpha
        self.capacity_factor = capacity_factor
        exact = torch.promote_types(dtype, torch.float32)

        def weight(present, *shape, dtype=dtype):
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device)) if present else None

        self.router = weight(True, experts, d_model)
        self.router_bias = weight(router_bias, experts, dtype=exact)
        correction = torch.zeros(experts, dtype=exact, device=device) if correction_bias else None
        self.register_buffer("correction_bias", correction)
        self.w1, self.b1 = weight(True, experts, 2 * ffn, d_model), weight(expert_bias, experts, 2 * ffn)
        self.w2, self.b2 = weight(True, experts, d_model, ffn), weight(expert_bias, experts, d_model)
        self.shared_w1 = weight(shared_ffn, 2 * shared_ffn, d_model)
        self.shared_w2 = weight(shared_ffn, d_model, shared_ffn)
        self.shared_gate = weight(shared_gate, 1, d_model)
        self.reset_parameters()

    @classmethod
    def from_spec(
        cls,
        spec: ModelSpec,
        *,
        capacity_factor: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "MoE":
        """The layer of a model's shape. ValueError if it has no experts, or if its rule is not known."""
        moe = spec.moe
        if moe is None:
            raise ValueError(f"spec: {spec.name!r} has no experts")
        if moe.routing is None:
            raise ValueError(f"spec: how {spec.architecture!r} routes is not known; set its moe.routing")
        if spec.act != "silu":
            raise ValueError(f"spec: act must be 'silu' in experts, got {spec.act!r}")
        return cls(
            spec.d_model,
            moe.ffn,
            moe.experts,
            moe.top_k,
            routing=moe.routing,
            shared_ffn=moe.shared_ffn,
            shared_gate=moe.shared_gate,
            router_bias=moe.router_bias,
            expert_bias=moe.expert_bias,
            correction_bias=moe.correction_bias,
            swiglu_limit=moe.swiglu_limit,
            swiglu_alpha=moe.swiglu_alpha,
            capacity_factor=capacity_factor,
            dtype=dtype,
            device=device,
        )

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(inputs), as nn.Linear does; biases 0."""
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name in ("router_bias", "b1", "b2"):
                    p.zero_()
                else:
                    bound = 1 / math.sqrt(p.shape[-1])
                    p.uniform_(-bound, bound)
            if self.correction_bias is not None:
                self.correction_bias.zero_()

    def forward(
        self,
        x: Float[Tensor, "*rows K"],
        *,
        keep: Bool[Tensor, "*rows"] | None = None,
        return_routing: bool = False,
    ) -> Float[Tensor, "*rows K"] | tuple[Float[Tensor, "*rows K"], Routing]:
        """Outputs (..., K) in x's dtype.

        x: (..., K), no positions at all included. keep: (...), False for padding: it is sent to no expert,
            counts in no statistic, and its output is 0 whatever it holds. return_routing: also what the
            router said.
        """
        if x.ndim < 1 or x.shape[-1] != self.d_model:
            raise ValueError(f"x must be (..., {self.d_model}), got {tuple(x.shape)}")
        flat = x.reshape(x.numel() // self.d_model, self.d_model)  # (T, K)
        if keep is not None:
            if keep.dtype != torch.bool or keep.shape != x.shape[:-1]:
                raise ValueError(
                    f"keep must be bool {tuple(x.shape[:-1])}, got {keep.dtype} {tuple(keep.shape)}"
                )
            keep = keep.reshape(flat.shape[0])
            flat = flat.masked_fill(~keep[:, None], 0.0)  # NaN times a gradient of 0 is NaN
        routing = self.route(flat, keep=keep)
        out = self.routed(flat, routing)
        if self.shared_w1 is not None:
            out = out + self.shared(flat)
        out = out.view(x.shape)
        return (out, routing) if return_routing else out

    def route(self, x: Float[Tensor, "T K"], *, keep: Bool[Tensor, " T"] | None = None) -> Routing:
        """Router logits of x (T, K), and what the rule makes of them; ids are -1 where `keep` is False."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.router_bias is None else self.router_bias.to(dtype)
        logits = F.linear(x.to(dtype), self.router.to(dtype), bias)
        r = self.routing
        weights, ids = route(
            logits,
            top_k=self.top_k,
            score=r.score,
            renormalize=r.renormalize,
            correction_bias=self.correction_bias,
            groups=r.groups,
            topk_groups=r.topk_groups,
            group_score=r.group_score,
            scaling=r.scaling,
        )
        if keep is not None:
            ids = ids.masked_fill(~keep[:, None], -1)
        return Routing(logits, weights, ids, r.score)

    def routed(self, x: Float[Tensor, "T K"], routing: Routing) -> Float[Tensor, "T K"]:
        """The routed experts alone, for x (T, K) under a routing of one's choice."""
        capacity = None
        if self.capacity_factor is not None:
            capacity = capacity_of(x.shape[0], self.experts, self.top_k, self.capacity_factor)
        return grouped_experts(
            x,
            self.w1,
            self.w2,
            routing.ids,
            routing.weights,
            b1=self.b1,
            b2=self.b2,
            limit=self.swiglu_limit,
            alpha=self.swiglu_alpha,
            capacity=capacity,
        )

    def shared(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T K"]:
        """The always-on expert, times its gate if it has one."""
        h = gated(grouped_linear(x, self.shared_w1[None], [x.shape[0]]))
        out = grouped_linear(h, self.shared_w2[None], [x.shape[0]])
        return out if self.shared_gate is None else out * torch.sigmoid(F.linear(x, self.shared_gate))

    @torch.no_grad()
    def rebalance(self, ids: Int64[Tensor, "*T k"], *, rate: float = 1e-3) -> None:
        """One step of `updated_bias`, from the choices (..., k) of a batch; to call after the optimizer's."""
        if self.correction_bias is None:
            raise ValueError("rebalance needs correction_bias=True")
        tokens = load(ids, self.experts).tokens
        self.correction_bias.copy_(updated_bias(self.correction_bias, tokens, rate=rate))

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, ffn={self.ffn}, experts={self.experts}, top_k={self.top_k}"
        return f"{sizes}, {self.routing}"
