"""Is the load even, and what is done about it: statistics, the auxiliary loss, the bias that needs none."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


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
    if per not in ("choice", "token"):
        raise ValueError(f"per must be 'choice' or 'token', got {per!r}")
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
    if not (math.isfinite(rate) and rate >= 0):
        raise ValueError(f"rate must be a number of at least 0, got {rate!r}")
    short = tokens.sum() - tokens * tokens.shape[0]  # E (mean - load), in integers: 0 at the mean
    return bias + rate * torch.sign(short).to(bias.dtype)
