"""Choosing the next token from logits.

The order is the usual one: temperature, then top-k, top-p and min-p, each on what the one before has left.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checks import is_number, number, positive, require, whole

Number = int | float


def probabilities(
    logits: Float[Tensor, "B V"],
    *,
    temperature: Number = 1.0,
    top_k: int = 0,
    top_p: Number = 1.0,
    min_p: Number = 0.0,
) -> Float[Tensor, "B V"]:
    """The distribution that a sampler draws from, (B, V), rows summing to 1.

    temperature: divides the logits; 0 puts all mass on the largest (the lowest id among equals).
    top_k: keep the k likeliest tokens, the lowest ids among equals; 0 keeps all.
    top_p: keep the likeliest tokens until their mass reaches p; the token that crosses p is kept (Holtzman
        et al. 2020). min_p: drop tokens less likely than min_p times the likeliest.

    float32, or float64 for float64 logits. Raises ValueError for options out of range and for logits with
    NaN, +inf, or nothing but -inf.
    """
    check_options(temperature, top_k, top_p, min_p)
    check_logits(logits)
    x = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        return torch.zeros_like(x).scatter_(1, greedy(logits)[:, None], 1.0)
    lowest, highest = torch.finfo(x.dtype).tiny, torch.finfo(x.dtype).max  # beyond them, 0 / 0
    x = (x - x.amax(dim=-1, keepdim=True)) / min(max(temperature, lowest), highest)  # the largest is 0
    p = torch.softmax(x, dim=-1)
    if not top_k and top_p == 1 and not min_p:
        return p
    ranked, order = torch.sort(p, dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_k:
        keep[:, top_k:] = False
        ranked = ranked / ranked[:, :top_k].sum(dim=-1, keepdim=True)
    if top_p < 1:
        before = ranked.cumsum(dim=-1) - ranked  # mass of the likelier tokens
        keep &= before < top_p
    if min_p:
        keep &= ranked >= min_p * ranked[:, :1]
    keep[:, 0] = True  # rounding must not empty a row
    p = torch.zeros_like(p).scatter_(1, order, torch.where(keep, ranked, 0.0))
    return p / p.sum(dim=-1, keepdim=True)


def greedy(logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
    """The likeliest token of each row, (B,); the lowest id among equals. A sampler like any other."""
    check_logits(logits)
    best = logits.amax(dim=-1, keepdim=True)
    return (logits == best).int().argmax(dim=-1)


def draw(weights: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """One id per row, (B,), likely in proportion to the row's weights (>= 0, of any sum above 0).

    uniforms: numbers in [0, 1), one for each row; the inverse of the cumulative sum turns them into ids.
    """
    total = weights.double().cumsum(dim=-1)
    ids = torch.searchsorted(total, uniforms.double()[:, None] * total[:, -1:], right=True)[:, 0]
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)  # lest rounding pass it
    return torch.minimum(ids, last)


class Sampler:
    """Draws one token per row: `Sampler(temperature=0.8, top_p=0.95, seed=0)(logits) -> ids`.

    seed: an integer, or one for each row of the batch; row b of an integer seed draws with seed + b. A row
    with the same seed draws the same tokens whatever batch it is in. None takes fresh randomness.

    Raises ValueError, at construction, for options out of range (see `probabilities`).
    """

    def __init__(
        self,
        *,
        temperature: Number = 1.0,
        top_k: int = 0,
        top_p: Number = 1.0,
        min_p: Number = 0.0,
        seed: int | Sequence[int] | None = None,
    ):
        check_options(temperature, top_k, top_p, min_p)
        self.options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        self.seed = seed
        for one in seed if isinstance(seed, Sequence) else () if seed is None else (seed,):
            whole("seed", one, -(2**63), 2**64 - 1)
        self._generators: list[torch.Generator] = []

    def __repr__(self) -> str:
        return f"Sampler({', '.join(f'{k}={v}' for k, v in self.options.items())}, seed={self.seed})"

    def __call__(self, logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
        # One uniform number per row, made on the CPU: the same on every device.
        numbers = [torch.rand((), generator=g).item() for g in self._rows(len(logits))]
        return draw(probabilities(logits, **self.options), torch.tensor(numbers, device=logits.device))

    def uniform(self) -> float:
        """The next uniform number in [0, 1) of the first row, from the sequence that its draws use up."""
        return torch.rand((), generator=self._rows(1)[0]).item()

    def _rows(self, n: int) -> list[torch.Generator]:
        if isinstance(self.seed, Sequence):
            require(len(self.seed) == n, "seed", f"one for each of {n} rows", self.seed)
        for b in range(len(self._generators), n):
            g = torch.Generator()
            if self.seed is None:
                g.seed()
            else:
                seed = self.seed[b] if isinstance(self.seed, Sequence) else self.seed + b
                g.manual_seed(seed % 2**64)
            self._generators.append(g)
        return self._generators[:n]


def check_options(temperature: Number, top_k: int, top_p: Number, min_p: Number) -> None:
    """Raise a ValueError for a sampling option out of its range; NaN is out of every range."""
    number("temperature", temperature, 0)
    whole("top_k", top_k, 0)  # 0 is all tokens
    positive("top_p", top_p, 1)
    require(is_number(min_p) and 0 <= min_p < 1, "min_p", "a number from 0 to below 1", min_p)


def check_logits(logits: Tensor) -> None:
    """Raise a ValueError for logits that no token can be chosen from."""
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be (B, V) with V of at least 1, got {tuple(logits.shape)}")
    best = logits.amax(dim=-1)  # NaN wins every maximum
    if not torch.isfinite(best).all():
        row = int((~torch.isfinite(best)).int().argmax())
        what = "NaN" if best[row].isnan() else "+inf" if best[row] > 0 else "nothing but -inf"
        raise ValueError(f"logits of row {row} hold {what}; no token can be chosen")
