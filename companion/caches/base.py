"""The protocol that every cache keeps, and the part that all share: who has how many tokens.

    cache.append(layer, k, v, lengths=...)     # write this step's keys and values
    out = cache.attend(layer, q)               # then read: the queries of the same tokens

Writing and attending are separate calls; when `attend` runs, the new tokens are already counted.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attend import Step
from ..checks import require, shape, whole
from ..cost import ModelSpec

Number = int | float


def whole_numbers(values: Any) -> list[int]:
    """The values as Python integers; an empty list for anything that is not a list of whole numbers."""
    try:
        return [index(x) for x in (values.tolist() if isinstance(values, Tensor) else values)]
    except TypeError:
        return []


def row_counts(lengths: Any, batch: int, S: int) -> list[int]:
    """`lengths` as a list: of each row's S tokens, how many are real. Raises ValueError if it can't be."""
    counts = whole_numbers(lengths)
    if len(counts) != batch or any(not 0 <= n <= S for n in counts):
        raise ValueError(f"lengths must be {batch} counts from 0 to S={S}, got {lengths!r}")
    return counts


def refuse_latent(spec: ModelSpec) -> None:
    """Raise a ValueError for a model that caches no keys and values."""
    if spec.mla is not None:
        raise ValueError(f"{spec.name} caches a latent vector, not keys and values; use kind='latent'")


@dataclass(frozen=True)
class Room:
    """Where the next token of every row goes, for a step that writes and attends in all layers by itself.

    k, v: a store per layer; in memory all lie like `layout`, the first layer's two in the kernels' layout
    (pages, size, Hkv, D). table: int32 (B, columns), the rows' pages, or None where row b has page b.
    before: tokens that each row has.
    """

    k: Sequence[Tensor]
    v: Sequence[Tensor]
    layout: tuple[Tensor, Tensor]
    table: Tensor | None
    before: list[int]


@runtime_checkable
class Attendable(Protocol):
    """What a model's layers append and attend to, as to a `Cache`: a cache, or a step of an engine."""

    spec: ModelSpec
    batch: int
    dtype: torch.dtype
    device: torch.device

    def row_lengths(self, layer: int = 0) -> list[int]: ...

    def append(self, layer: int, k: Tensor, v: Tensor | None, *, lengths: Any = None) -> None: ...

    def attend(self, layer: int, q: Tensor, **options) -> Tensor | tuple[Tensor, Tensor]: ...

    def room(self) -> Room | None: ...

    def filled(self) -> None: ...


class Cache(ABC):
    """Keys and values of `batch` sequences, a store per layer; positions count from 0 in every row.

    Rows may have different lengths: the tokens of a step are right-padded to (B, S), and `lengths` says how
    many of the S are real in each row. Padding is never stored.

    Attributes: `spec`, `batch`, `max_tokens`, `dtype`, `device`; `step`, the most tokens that one `append`
    may bring, or None; `reach`, the most positions that a query ever spans, or None for those of the text.
    """

    step: int | None = None
    reach: int | None = None

    def __init__(
        self,
        spec: ModelSpec,
        *,
        batch: int = 1,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.spec, self.batch = spec, whole("batch", batch)
        self.max_tokens = whole("max_tokens", max_tokens)
        self.dtype, self.device = dtype, torch.device(device)
        # Per layer, because layers are written one after another within a step.
        self._rows: list[list[int]] = [[0] * batch for _ in range(spec.layers)]
        self._fresh: list[list[int] | None] = [None] * spec.layers  # tokens of the last append, per row
        self._last: Step | None = None  # that of the pass, which all its layers share

    # --- what a kind of cache must provide ---------------------------------------------------------------

    @abstractmethod
    def append(
        self,
        layer: int,
        k: Float[Tensor, "B Hkv S D"],
        v: Float[Tensor, "B Hkv S Dv"] | None,
        *,
        lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    ) -> None:
        """Store the keys and values of S new tokens per row; of row b only the first lengths[b].

        k: (B, Hkv, S, D), v: (B, Hkv, S, Dv). lengths: None means S in every row. Raises ValueError, and
        stores nothing, for shapes that do not fit and for tokens beyond `max_tokens`.
        """

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: Float[Tensor, "B Hq S D"],
        *,
        softmax_scale: Number | None = None,
        softcap: Number = 0.0,
        sinks: Float[Tensor, " Hq"] | None = None,
        return_lse: bool = False,
    ) -> Float[Tensor, "B Hq S Dv"] | tuple[Float[Tensor, "B Hq S Dv"], Float[Tensor, "B Hq S"]]:
        """Causal attention of q over everything stored, within the layer's window if it has one.

        q: (B, Hq, S, D), the queries of the tokens of the last `append` to this layer, padded like them; or,
        after `crop` or `fork`, of the last S tokens of every row. Results at padded positions mean nothing.
        The options are those of `companion.attention.sdpa`.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated, counted from the tensors."""

    @property
    @abstractmethod
    def nbytes_used(self) -> int:
        """Bytes that hold tokens now."""

    @abstractmethod
    def _drop(self, layer: int, row: int, start: int, stop: int) -> None:
        """Forget the stored tokens start..stop-1 of one row."""

    def _check_crop(self, keep: list[int]) -> None:
        """Raise a ValueError if a row cannot go back to that many tokens; here every row can."""
        return

    def room(self) -> Room | None:
        """Room for one more token in every row and layer, taken; None where tokens come by `append` alone.

        Raises ValueError, as `append` does, and takes none, where there is none.
        """
        return None

    # --- what all share ----------------------------------------------------------------------------------

    def lengths(self, layer: int = 0) -> Int[Tensor, " B"]:
        """Tokens stored for each row in this layer, int32 (B,)."""
        return torch.tensor(self._rows[self._layer(layer)], dtype=torch.int32, device=self.device)

    def row_lengths(self, layer: int = 0) -> list[int]:
        """The same as Python integers, free of a copy from the device."""
        return list(self._rows[self._layer(layer)])

    def crop(self, n: int | Sequence[int]) -> None:
        """Keep the first n tokens of every row (one n, or one for each row); shorter rows stay as they are.

        Raises ValueError, changing nothing, for a negative n or a wrong number of them.
        """
        keep = self._per_row(n)
        if len(keep) != self.batch or min(keep) < 0:
            raise ValueError(f"n must be a count of tokens, or {self.batch} of them, got {n!r}")
        self._check_crop(keep)
        for layer, rows in enumerate(self._rows):
            for b, (have, kept) in enumerate(zip(rows, keep)):
                if kept < have:
                    self._drop(layer, b, kept, have)
                    rows[b] = kept
            self._fresh[layer] = None

    def fork(self) -> "Cache":
        """An independent copy, holding the same tokens."""
        twin = copy.deepcopy(self)
        twin._fresh, twin._last = [None] * self.spec.layers, None
        return twin

    def __len__(self) -> int:
        """Tokens in the longest row."""
        return max(self._rows[0])

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.spec.name}, batch={self.batch}, tokens={len(self)} of "
            f"{self.max_tokens}, {self.nbytes_used} of {self.nbytes} bytes used)"
        )

    def _layer(self, layer: int) -> int:
        return whole("layer", layer, 0, self.spec.layers - 1)

    def _window(self, layer: int) -> int | None:
        """How many tokens this layer sees, the newest included; None for all of them."""
        return self.spec.window if self.spec.layer_types[layer] == "sliding" else None

    def _plan(self, layer: int, S: int, lengths) -> tuple[list[int], list[int]]:
        """(tokens stored before, tokens to add) per row, once it is sure that they fit."""
        before = self._rows[self._layer(layer)]
        if lengths is None:
            new = [S] * self.batch
        else:
            new = row_counts(lengths, self.batch, S)
        longest = max(b + n for b, n in zip(before, new))
        if longest > self.max_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens}, but this step brings a row to {longest} tokens; "
                "make a larger cache, or crop this one"
            )
        return before, new

    def _commit(self, layer: int, before: list[int], new: list[int]) -> None:
        self._rows[layer] = [b + n for b, n in zip(before, new)]
        self._fresh[layer] = new

    def _even(self) -> list[int] | None:
        """Tokens stored per row where every layer has the same and another will fit; None amid a step."""
        before, _ = self._plan(0, 1, None)
        return before if all(rows == before for rows in self._rows) else None

    def filled(self) -> None:
        """Count the token of every row and layer for which `room` was taken."""
        for layer, rows in enumerate(self._rows):
            self._commit(layer, rows, [1] * self.batch)

    def _starts(self, layer: int, S: int) -> list[int]:
        """Position of the first of S queries in each row."""
        rows, fresh = self._rows[layer], self._fresh[layer]
        if fresh is None or max(fresh) > S:
            fresh = [S] * self.batch
        return [n - f for n, f in zip(rows, fresh)]

    def _step_of(self, starts: list[int], stops: list[int]) -> Step:
        """The step of these rows: made by the first layer that asks, and handed to the others."""
        found = self._last
        if found is None or found.starts != starts or found.stops != stops:
            found = self._last = Step(starts, stops, self.device)
        return found

    def _per_row(self, n: int | Sequence[int]) -> list[int]:
        """One count for all rows, or one for each, as a list."""
        return whole_numbers([n] * self.batch if isinstance(n, int) else n)

    def _one_length(self, layer: int) -> int:
        """Tokens in every row, for `read`, which returns rows of one length."""
        rows = self._rows[self._layer(layer)]
        if len(set(rows)) > 1:
            raise ValueError(f"rows have lengths {rows}; read needs rows of one length")
        return rows[0]

    def _check_kv(self, k: Tensor, v: Tensor | None) -> None:
        """Keys and values of new tokens, for a cache that stores both."""
        heads = self.spec.kv_heads
        self._check("k", k, (self.batch, heads, "S", self.spec.head_dim))
        require(v is not None, "v", "the values beside the keys", v)
        self._check("v", v, (self.batch, heads, k.shape[2], self.spec.v_head_dim))
        if self.step is not None and k.shape[2] > self.step:
            raise ValueError(f"k must be of at most step={self.step} tokens at once, got {k.shape[2]}")

    def _check(self, name: str, x: Tensor, expected: tuple[int | str, ...]) -> None:
        """x is of the shape (B, heads, S, width) that is expected, and of the cache's type."""
        shape(name, x, *expected)
        if x.dtype != self.dtype:
            raise ValueError(f"{name} must be of the cache's dtype {self.dtype}, got {x.dtype}")
