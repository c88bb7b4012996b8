"""The weights of one rank, cut out of a whole model's while they are asked for.

Which way a tensor is cut follows from its name: matrices that lead into heads or into a feed-forward's width
lose rows, those that lead out lose columns, experts are renumbered, everything else is whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..cost import ModelSpec, RoutingSpec, rank_spec
from ..model.experts import interleaved
from ..model.families import family_of

ROWS = {"q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3"}
KEY_VALUE_ROWS = {"k_proj", "v_proj"}
COLUMNS = {"o_proj", "down_proj", "w2"}
FUSED = {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}  # directly below "experts"


class Slices:
    """A function from Hugging Face's tensor names to this rank's part of the tensor, in memory of its own.

    spec, weights: of the whole model. tensor, expert: (rank, ranks). Experts count from 0 on every rank.

    Attributes: `part`, the ModelSpec whose shapes the tensors have: that of `rank_spec`, with as many experts
    as the rank owns. Raises ValueError for ranks that do not divide, and for a tensor that is not there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor] | Callable[[str], Tensor],
        *,
        tensor: tuple[int, int] = (0, 1),
        expert: tuple[int, int] = (0, 1),
    ):
        self.spec, self.weights, self.tensor, self.expert = spec, weights, tensor, expert
        self.family = family_of(spec)
        self.interleaved = self.family.experts is interleaved
        self.part = part = rank_spec(spec, tensor=tensor[1], expert=expert[1])
        if expert[1] > 1:
            m, owned = part.moe, part.moe.experts // expert[1]
            # Routed among the rank's own, this would be nonsense; `spread` puts the model's router there.
            rule = m.routing and RoutingSpec()
            own = replace(m, experts=owned, top_k=min(m.top_k, owned), routing=rule)
            self.part = replace(part, moe=own)

    def __call__(self, name: str) -> Tensor:
        name = self._renumbered(name)
        x = self.whole(name)
        cut = self._cut(name.split("."), x)
        # A view would keep the whole tensor in memory.
        return cut if cut is x else cut.clone(memory_format=torch.contiguous_format)

    def whole(self, name: str) -> Tensor:
        """The tensor of the whole model. Raises ValueError if there is none."""
        if isinstance(self.weights, Mapping):
            if name not in self.weights:
                raise ValueError(f"{self.spec.name}: weights have no tensor {name!r}")
            return self.weights[name].detach()
        return self.weights(name)

    def router(self, layer: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(matrix, bias or None, correction or None) of a layer's router, whole."""
        for place in self.family.places:
            prefix, m = f"model.layers.{layer}.{place}{self.family.router}", self.spec.moe
            try:
                matrix = self.whole(f"{prefix}weight")
            except ValueError:
                continue
            bias = self.whole(f"{prefix}bias") if m.router_bias else None
            correction = self.whole(f"{prefix}e_score_correction_bias") if m.correction_bias else None
            return matrix, bias, correction
        raise ValueError(f"{self.spec.name}: weights have no router in layer {layer}")

    def _renumbered(self, name: str) -> str:
        """Expert 0 of this rank is another one of the model."""
        head, found, tail = name.partition(".experts.")
        number, dot, rest = tail.partition(".")
        if not (found and dot and number.isdecimal()):
            return name
        first = self.expert[0] * self.part.moe.experts
        return f"{head}.experts.{first + int(number)}.{rest}"

    def _cut(self, path: list[str], x: Tensor) -> Tensor:
        part, kind = path[-2:] if len(path) > 1 else ("", path[-1])
        rank, ranks = self.tensor
        if part == "experts" and kind in FUSED:
            return self._fused(kind, equal(x, 0, *self.expert))
        if self.family.experts is not None and ".".join([part, kind]) in self._router_names():
            return equal(x, 0, *self.expert)
        if part in COLUMNS:
            return equal(x, 1, rank, ranks) if kind == "weight" else once(x, rank)
        full = self.spec.qk_norm == "full"
        if part in ROWS or kind == "sinks" or (full and part == "q_norm"):
            return equal(x, 0, rank, ranks)
        if part in KEY_VALUE_ROWS or (full and part == "k_norm"):
            copies = max(1, ranks // self.spec.kv_heads)
            return equal(x, 0, rank // copies, ranks // copies)
        return x

    def _router_names(self) -> set[str]:
        return {self.family.router + kind for kind in ("weight", "bias", "e_score_correction_bias")}

    def _fused(self, kind: str, x: Tensor) -> Tensor:
        """All experts in one: (E, 2N, K) and (E, K, N), or transposed with gate and up taking turns."""
        rank, ranks = self.tensor
        if kind == "down_proj_bias":
            return once(x, rank)
        if kind == "down_proj":
            return equal(x, 1 if self.interleaved else 2, rank, ranks)
        if self.interleaved:  # neighbours are a pair, so the columns of a slice of the width lie together
            return equal(x, x.ndim - 1, rank, ranks, pieces_of=2)
        if ranks == 1:
            return x
        return torch.cat([equal(half, 1, rank, ranks) for half in x.chunk(2, dim=1)], dim=1)


def equal(x: Tensor, dim: int, rank: int, ranks: int, *, pieces_of: int = 1) -> Tensor:
    """Part `rank` of `ranks` equal ones along `dim`, a view; x itself if there is one part.

    pieces_of: how many neighbours along `dim` stay together. Raises ValueError for a size that can't be cut.
    """
    if ranks == 1:
        return x
    if x.shape[dim] % (ranks * pieces_of):
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no {ranks} equal parts along dim {dim}")
    size = x.shape[dim] // ranks
    return x.narrow(dim, rank * size, size)


def once(x: Tensor, rank: int) -> Tensor:
    """A bias that all ranks would add: x on the first, zeros elsewhere."""
    return x if rank == 0 else torch.zeros_like(x)
