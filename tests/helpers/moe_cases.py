"""Inputs of the mixture-of-experts kernels, and errors against float64."""

import torch

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def off_by(got, want):
    """Relative Frobenius error; 0 of nothing against nothing."""
    scale = want.double().norm()
    return float((got.double() - want.double()).norm() / scale) if scale > 0 else float(got.double().norm())


def normal(*shape, dtype=torch.float32, seed=0, scale=1.0):
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * scale).to(dtype)


def routing(T, E, k, *, seed=0, spread="uniform"):
    """(weights, ids): k distinct experts for each token. "one": all on the last; "odd": only odd ones."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(T, E, generator=g)
    if spread == "odd":
        scores[:, ::2] -= 2
    ids = scores.argsort(dim=1, descending=True)[:, :k]
    if spread == "one":
        ids = torch.full((T, k), E - 1)
    return torch.rand(T, k, generator=g), ids


def layer(T, E, k, *, K=48, N=40, dtype=torch.float32, seed=0, **how):
    """x, w1, w2, topk_weights, topk_ids; sizes that no block divides."""
    x = normal(T, K, dtype=dtype, seed=seed)
    w1 = normal(E, 2 * N, K, dtype=dtype, seed=seed + 1, scale=K**-0.5)
    w2 = normal(E, K, N, dtype=dtype, seed=seed + 2, scale=N**-0.5)
    return x, w1, w2, *routing(T, E, k, seed=seed + 3, **how)
