"""What one pass does to the rows of a cache: made once, read by all layers.

Lengths are Python integers, because a CPU plans with them, and tensors on the device for kernels: copied
there when first asked for, once, since every copy from the host is waited for.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor


class Workspace:
    """Memory that is kept from step to step: fresh pages cost more than the copy into them."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def room(self, name: str, like: Tensor, n: int) -> Tensor:
        """Flat memory of at least n elements of the kind of `like`."""
        flat = self._flat.get(name)
        if flat is None or len(flat) < n:
            with torch.inference_mode(False):  # or it could not be written outside that mode
                flat = self._flat[name] = like.new_empty(n + n // 2)
        return flat


class Step:
    """Rows whose queries begin at `starts` and whose tokens end before `stops`, on a device.

    table: int32 (B, columns), each row's blocks, where they lie in pages. first: the first block of a single
    row whose blocks are neighbours. slots: for each row, where its new tokens go, counted through the pages.
    workspace: where blocks are gathered. ordered: slot j of a row holds position j.
    """

    ordered = True
    packed = False  # rows of a packed step, `PackedRows`

    def __init__(
        self,
        starts: Sequence[int],
        stops: Sequence[int],
        device: torch.device,
        *,
        table: Tensor | None = None,
        first: int | None = None,
        slots: Sequence[Sequence[int]] | None = None,
        workspace: Workspace | None = None,
    ):
        self.starts, self.stops, self.device = list(starts), list(stops), device
        self.table, self.first, self.slots, self.workspace = table, first, slots, workspace
        self.n = max(self.stops)

    @cached_property
    def counts(self) -> list[int]:
        """Tokens that each row gets."""
        return [stop - start for start, stop in zip(self.starts, self.stops)]

    @cached_property
    def even(self) -> bool:
        """Whether all rows begin and end alike."""
        return all(a == self.starts[0] for a in self.starts) and all(n == self.n for n in self.stops)

    @cached_property
    def one_each(self) -> bool:
        """Whether every row has one query, that of its last token."""
        return all(a + 1 == n for a, n in zip(self.starts, self.stops))

    @cached_property
    def seqlens(self) -> Tensor:
        """`stops`, int32 (B,)."""
        return torch.tensor(self.stops, dtype=torch.int32, device=self.device)

    @cached_property
    def new_tokens(self) -> Tensor:
        """`counts`, int32 (B,)."""
        return torch.tensor(self.counts, dtype=torch.int32, device=self.device)

    def ahead(self, S: int) -> Tensor | None:
        """int32 (B,): how far S queries reach beyond a row's tokens (they lie elsewhere, or are padding)."""
        if "_ahead" not in self.__dict__ or self._ahead[0] != S:
            found = [a + S - n for a, n in zip(self.starts, self.stops)]
            tensor = torch.tensor(found, dtype=torch.int32, device=self.device) if any(found) else None
            self._ahead = S, tensor
        return self._ahead[1]

    def slot_mapping(self, S: int) -> Tensor:
        """int64 (B, S): where each token goes, -1 for padding."""
        if "_mapping" not in self.__dict__ or self._mapping.shape[1] != S:
            padded = [[*row, *[-1] * (S - len(row))] for row in self.slots]
            self._mapping = torch.tensor(padded, dtype=torch.int64, device=self.device)
        return self._mapping

    @cached_property
    def places(self) -> list[Tensor | slice | None]:
        """The same for torch, row by row; one token as a slice, which is faster, and None for no token."""
        return [
            (slice(row[0], row[0] + 1) if len(row) == 1 else torch.tensor(row, device=self.device))
            if row
            else None
            for row in self.slots
        ]

    def at(self, S: int) -> Tensor:
        """Positions of S queries, (B, S)."""
        start = torch.tensor(self.starts, device=self.device)[:, None]
        return start + torch.arange(S, device=self.device)

    def seen(self, S: int, n: int, window: int | None) -> Tensor:
        """Which of n slots each of S queries may see: bool (B, S, n)."""
        return visible_slots(self.starts, self.stops, S, n, window, self.device)

    def gathered(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Pages (Hkv, num_blocks, block_size, D) as rows (B, Hkv, n, D); views of neighbouring blocks."""
        if self.first is not None:
            return tuple(s[:, self.first :].flatten(1, 2)[None, :, : self.n] for s in (k, v))
        size = self.table.shape[0] * -(-self.n // k.shape[2]) * k.shape[2]
        rooms = [None, None]
        if self.workspace is not None:
            rooms = [
                self.workspace.room(name, s, s.shape[0] * size * s.shape[3]) for name, s in zip("kv", (k, v))
            ]
        k, v = (gather(s, self.table, self.n, room) for s, room in zip((k, v), rooms))
        if len(set(self.stops)) > 1:  # slots behind a shorter row hold whatever their block held before
            stop = torch.tensor(self.stops, device=self.device)[:, None]
            unused = (torch.arange(self.n, device=self.device) >= stop)[:, None, :, None]
            k, v = k.masked_fill(unused, 0), v.masked_fill(unused, 0)
        return k, v


class PackedRows(Step):
    """Rows of one query each in pages, laid side by side head by head, so that one product serves all.

    The table is padded with a row's own first block: finite where the row is, and never another's.
    """

    packed = True

    def __init__(self, starts, stops, device, *, heads: int, num_blocks: int, **pages):
        super().__init__(starts, stops, device, **pages)
        if self.first is None:
            offsets = torch.arange(heads, device=device) * num_blocks
            # Rows of the storage seen as (Hkv * blocks, ...).
            self.blocks = (offsets[:, None] + self.table.flatten()).flatten()
        self._unseen: dict[int | None, Tensor | None] = {}

    def unseen(self, window: int | None) -> Tensor | None:
        """(B, 1, n): slots that a row must not see; None if there is no such slot."""
        if window not in self._unseen:
            seen = self.seen(1, self.n, window)
            self._unseen[window] = None if seen.all() else ~seen
        return self._unseen[window]

    def side_by_side(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (Hkv, B, n, D): position j in slot j, and something finite behind a row's end."""
        if self.first is not None:
            k, v = (s[:, self.first :].flatten(1, 2)[:, None, : self.n] for s in (k, v))
            return k, v
        return self._gather(k, "k"), self._gather(v, "v")

    def gathered(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The same row by row, (B, Hkv, n, D)."""
        k, v = self.side_by_side(k, v)
        return k.transpose(0, 1), v.transpose(0, 1)

    def _gather(self, store: Tensor, name: str) -> Tensor:
        heads, blocks, size, width = store.shape
        n = len(self.blocks) * size * width
        out = self.workspace.room(name, store, n)[:n].view(-1, size * width)
        # Whole blocks along the first axis: copied by all threads, twice as fast as along the second.
        torch.index_select(store.view(heads * blocks, size * width), 0, self.blocks, out=out)
        return out.view(heads, len(self.stops), self.table.shape[1] * size, width)[:, :, : self.n]


def slot_of(position: Tensor, sinks: int, size: int) -> Tensor:
    """Where the tokens at these positions lie."""
    return torch.where(position < sinks, position, sinks + (position - sinks) % size)


class Ring(Step):
    """A step over a ring, in which a row's slots are in no order: a key carries its position in its rotation.

    reached: the longest each row has been. heads: key heads; slots: of a row and head, in the first `sinks`
    of which the first tokens stay; of the others `size` at most are the ring. window: tokens a query sees.
    """

    ordered = False

    def __init__(self, starts, stops, device, *, reached, heads, slots, sinks, size, window):
        super().__init__(starts, stops, device)
        self.reached, self.heads, self.slots = list(reached), heads, slots
        self.sinks, self.size, self.window = sinks, size, window

    def held(self, n: int) -> Tensor:
        """Position of the token in each of n slots, (B, n); -1 where there is none."""
        slot = torch.arange(n, device=self.device)
        stop = torch.tensor(self.stops, device=self.device)[:, None]
        gone = torch.tensor(self.reached, device=self.device)[:, None] - self.size
        # The latest position before `stop` that maps to this slot.
        turns = torch.div(stop - 1 - slot, self.size, rounding_mode="floor").clamp(min=0)
        position = torch.where(slot < self.sinks, slot, slot + turns * self.size)
        # After a crop a slot may have lost both: the token that was dropped and the one that it overwrote.
        there = (position < stop) & ((position >= gone) | (position < self.sinks))
        return torch.where(there, position, -1)

    def seen(self, S, n, window=None):
        held, at = self.held(n)[:, None], self.at(S)[..., None]  # (B, 1, n), (B, S, 1)
        recent = (held > at - self.window) | (held < self.sinks)
        return (held >= 0) & (held <= at) & recent

    @cached_property
    def in_view(self) -> Step:
        """For one query a row: a step over the pages of one token that it sees."""
        s, last = self.sinks, [min(a, n - 1) for a, n in zip(self.starts, self.stops)]
        sinks = [min(s, p + 1) for p in last]
        first = [max(s, p - self.window + 1) for p in last]
        stops = [a + max(0, p + 1 - lo) for a, p, lo in zip(sinks, last, first)]
        n, first = torch.tensor([sinks, first], device=self.device)[..., None]  # (B, 1) each
        column = torch.arange(s + self.window, device=self.device)
        slot = slot_of(torch.where(column < n, column, first + column - n), s, self.size)
        row = torch.arange(len(stops), device=self.device)[:, None] * self.heads * self.slots
        return Step([n - 1 for n in stops], stops, self.device, table=(slot + row).int())

    def pages(self, store: Tensor) -> Tensor:
        """The first slots (B, H, n, D) of a store as pages of one token, (pages, 1, H, D), of the whole.

        Slot s of row b is page b H slots + s.
        """
        B, H, _, D = store.shape
        n = self.slots
        return store.as_strided((B * H * n - (H - 1) * n, 1, H, D), (D, D, n * D, 1))


def visible_slots(
    starts: list[int], stops: list[int], S: int, n: int, window: int | None, device: torch.device
) -> Tensor:
    """Which of n slots each query may see: bool (B, S, n). Query i of row b stands at starts[b] + i."""
    slot = torch.arange(n, device=device)
    at = torch.tensor(starts, device=device)[:, None] + torch.arange(S, device=device)  # (B, S)
    seen = slot <= at[..., None]
    seen &= slot < torch.tensor(stops, device=device)[:, None, None]
    if window is not None:
        seen &= slot > at[..., None] - window
    return seen


def gather(store: Tensor, block_table: Tensor, n: int, out: Tensor | None = None) -> Tensor:
    """The first n tokens of every row: store (Hkv, num_blocks, block_size, D) -> (B, Hkv, n, D).

    block_table (B, columns): what a row has beyond its blocks may be anything, and so may what comes back
    for it. out: flat memory for the result, at least as large; the next call with it overwrites the result.
    """
    heads, num_blocks, size, width = store.shape
    table = block_table[:, : -(-n // size)].long()
    B, columns = table.shape
    table = torch.where((table >= 0) & (table < num_blocks), table, 0)
    shape = heads, B * columns, size, width
    if out is not None:
        out = out[: math.prod(shape)].view(shape)
    # index_select copies whole blocks; indexing with brackets takes twice as long.
    rows = torch.index_select(store, 1, table.flatten(), out=out).view(heads, B, columns * size, width)
    return rows.transpose(0, 1)[:, :, :n]
