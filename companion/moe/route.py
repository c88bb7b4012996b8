"""Which experts a token is sent to, and with what weight: the rules of eight families as one function.

    score -> (+ bias) -> best groups -> top k -> weights of the unbiased score -> renormalise -> scale

| family | score | renormalize | groups | scaling |
|---|---|---|---|---|
| Mixtral | softmax | yes | - | - |
| Qwen2-MoE, Qwen3-MoE, OLMoE | softmax | norm_topk_prob | - | - |
| DeepSeek-V2 | softmax | no | by their best score | 16 |
| DeepSeek-V3, Kimi-K2, GLM-4.5 | sigmoid, chosen with a bias | yes | by their two best, summed | 1 to 2.8 |
| gpt-oss | topk_softmax | - | - | - |

Softmax over all experts, then top k, then division by the sum is softmax over the chosen logits, exactly:
with renormalisation "softmax" and "topk_softmax" are two names for one rule. Without it, or for sigmoids,
they differ.

Whether the load is even, and what is done about it, stands below: statistics, the auxiliary loss, and the
bias that needs none.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ..checks import choice, number, shape
from ..cost.parts import check_routing

TINY = 1e-20  # DeepSeek-V3's: sigmoids may all be 0. It changes no sum above 1e-4, not even in float64


def route(
    logits: Float[Tensor, "T E"],
    *,
    top_k: int,
    score: str = "softmax",
    renormalize: bool,
    correction_bias: Float[Tensor, " E"] | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "top2_sum",
    scaling: float = 1.0,
) -> tuple[Float[Tensor, "T k"], Int64[Tensor, "T k"]]:
    """Choose `top_k` of E experts for each of T tokens.

    logits: (T, E), what the router's matrix gives; any float dtype. T may be 0.
    top_k: experts per token.
    score: "softmax" over the E logits, "sigmoid" of each, or "topk_softmax": the logits choose, and a
        softmax over the chosen ones weights.
    renormalize: divide the chosen weights by their sum. Of no effect with "topk_softmax".
    correction_bias: (E,), added to the scores for choosing only, never to the weights.
    groups, topk_groups, group_score: the experts stand in `groups` equal groups, neighbours together; a
        token may use those of its best `topk_groups`. A group is ranked by the largest of its (biased)
        scores, "max", or by the sum of its two largest, "top2_sum".
    scaling: factor on the weights, after renormalisation.

    Returns weights (T, k) and ids (T, k) int64, best expert first. Computed in float32, or float64 for
    float64 logits; the weights keep that dtype. Of equal scores the lower index wins, between groups too.
    Gradients flow through the weights.

    A row of NaN gives weights of NaN and k distinct experts, and touches no other row. Experts of other
    groups are out of the choice (-inf, not 0: a biased score may be negative).

    Raises ValueError, naming the argument, for a rule that cannot choose top_k of E experts.

    Sources: Shazeer et al. 2017, section 2.1 (top k); Jiang et al. 2024 (Mixtral); DeepSeek-V2 report,
    section 2.2.2 (groups); DeepSeek-V3 report, section 2.1.2 (sigmoid, bias, groups by two best); the
    gpt-oss model code.
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floats of shape (T, E), got {logits.dtype} {tuple(logits.shape)}")
    E = logits.shape[1]
    check_routing(E, top_k, score, groups, topk_groups, group_score, scaling)
    if correction_bias is not None:
        shape("correction_bias", correction_bias, E)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scores = scored(logits.to(dtype), score)

    with torch.no_grad():  # a choice has no gradient
        choice = scores if correction_bias is None else scores + correction_bias.to(dtype)
        if groups > 1:
            choice = _in_best_groups(choice, groups, topk_groups, group_score)
        ids = largest(choice, top_k)

    weights = scores.gather(1, ids)
    if score == "topk_softmax":
        weights = torch.softmax(weights, dim=-1)
    elif renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return (weights if scaling == 1.0 else weights * scaling), ids


def scored(logits: Float[Tensor, "T E"], score: str) -> Float[Tensor, "T E"]:
    """Scores (T, E) of logits (T, E): what is compared, and what the weights are taken from."""
    if score == "softmax":
        return torch.softmax(logits, dim=-1)
    return torch.sigmoid(logits) if score == "sigmoid" else logits


def largest(values: Float[Tensor, "T n"], k: int) -> Int64[Tensor, "T k"]:
    """Indices (T, k) of the k largest of each row, best first; of equal ones the lower index.

    torch.topk promises no order of equal values, and gives different ones on a CPU and on a GPU.
    """
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :k]


def _in_best_groups(choice: Tensor, groups: int, topk_groups: int, group_score: str) -> Tensor:
    """`choice` (T, E) with -inf for experts outside each row's best groups."""
    T, E = choice.shape
    grouped = choice.view(T, groups, E // groups)
    rank = grouped.amax(dim=-1) if group_score == "max" else grouped.topk(2, dim=-1).values.sum(dim=-1)
    keep = torch.zeros(T, groups, dtype=torch.bool, device=choice.device)
    keep.scatter_(1, largest(rank, topk_groups), True)
    return grouped.masked_fill(~keep[:, :, None], -math.inf).view(T, E)


@dataclass(frozen=True)
class Load:
    """How many tokens each expert got.

    tokens         (E,) int64; a token sent to k experts counts once for each
    share          (E,) float64, tokens over their sum; all 0 if there are none
    max_over_mean  the busiest expert against an even share: 1 is even, E is all on one; 0 if there are none
    entropy        of the shares, in nats: log(E) is even, 0 is all on one
    distinct       experts with at least one token: whose weights a step has to read
    """

    tokens: Int64[Tensor, " E"]
    share: Float[Tensor, " E"]
    max_over_mean: float
    entropy: float
    distinct: int


def load(ids: Int64[Tensor, "*T k"], experts: int) -> Load:
    """The load of `experts` under the choices `ids` (..., k); -1, a slot that was not sent, is not counted.

    Raises ValueError for ids out of range.
    """
    flat = ids.reshape(ids.numel())
    if flat.numel() and not (-1 <= int(flat.min()) and int(flat.max()) < experts):
        raise ValueError(
            f"ids must be in 0..{experts - 1}, or -1; got {int(flat.min())} to {int(flat.max())}"
        )
    tokens = torch.bincount(flat[flat >= 0], minlength=experts)
    total = int(tokens.sum())
    share = tokens.double() / max(total, 1)
    return Load(
        tokens=tokens,
        share=share,
        max_over_mean=float(share.max()) * experts,
        entropy=float(torch.special.entr(share).sum()),
        distinct=int((tokens > 0).sum()),
    )


def aux_loss(
    probs: Float[Tensor, "T E"],
    ids: Int64[Tensor, "T k"],
    *,
    per: str = "choice",
    keep: Bool[Tensor, " T"] | None = None,
) -> Float[Tensor, ""]:
    """The load-balancing loss of Switch Transformers, E * sum_i f_i P_i (Fedus et al. 2021, eq. 4 to 6).

    probs: (T, E), rows that sum to 1: the softmax over all experts; for sigmoid scores, the scores over
        their sum (DeepSeek-V3 report, section 2.1.2). P_i is its mean over tokens, and carries the gradient.
    ids: (T, k), the experts chosen. f_i has two conventions, which agree at k = 1:
        per="choice"  f_i = share of the T k choices that went to expert i. An even router has loss 1, for
                      any k (DeepSeek-V2 and V3).
        per="token"   f_i = tokens that chose expert i, over T. The f_i add up to k, and an even router has
                      loss k (transformers' `load_balancing_loss_func`, for Mixtral, OLMoE and Qwen-MoE).
    keep: (T,), False for padding, which counts neither in f nor in P. Without any token the loss is 0.

    Not yet multiplied by its coefficient (0.01 in Switch; 0.001 by default in transformers' Mixtral).

    Raises ValueError for another `per`, shapes that do not fit, and ids out of range.
    """
    choice("per", per, ("choice", "token"))
    if probs.ndim != 2 or ids.ndim != 2 or ids.shape[0] != probs.shape[0]:
        raise ValueError(
            f"probs (T, E) and ids (T, k) must fit, got {tuple(probs.shape)}, {tuple(ids.shape)}"
        )
    if keep is not None:
        probs, ids = probs[keep], ids[keep]
    (T, E), k = probs.shape, ids.shape[1]
    if T == 0:
        return probs.sum()
    f = load(ids, E).tokens.to(probs.dtype) / (T * k if per == "choice" else T)
    return E * (f * probs.mean(dim=0)).sum()


def updated_bias(
    bias: Float[Tensor, " E"], tokens: Int64[Tensor, " E"], *, rate: float = 1e-3
) -> Float[Tensor, " E"]:
    """The correction bias after a step: up by `rate` for an expert below the mean load, down above it.

    bias, tokens: (E,); tokens is the load of the step. An expert with exactly the mean keeps its bias;
    without any token all do. Only the sign counts, so the update is as large for a slight unevenness as for
    a gross one, and no gradient is involved.

    Source: Wang et al. 2024 (arXiv 2408.15664), algorithm 1; DeepSeek-V3 used a rate of 0.001.
    """
    if bias.shape != tokens.shape or bias.ndim != 1:
        raise ValueError(f"tokens must have bias's shape {tuple(bias.shape)}, got {tuple(tokens.shape)}")
    number("rate", rate, 0)
    short = tokens.sum() - tokens * tokens.shape[0]  # E (mean - load), in integers: 0 at the mean
    return bias + rate * torch.sign(short).to(bias.dtype)
