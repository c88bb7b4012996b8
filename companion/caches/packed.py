"""Where quantized tokens lie: packed fields, in one piece per row or in the blocks of a pool, behind a tail.

`TailedLayer` is one layer of a quantized cache: packed groups for the old tokens, a tail in full precision
for the new ones. The packed part is a `Packed` (room for all tokens of every row) or a `PagedPacked`.
"""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..quantize import Codec, QuantizedTensor

FIELDS = ("codes", "scale", "zero")


class TailedLayer:
    """One layer's store. unit: tokens that enter the packed part together; make: builds the packed parts.

    Attributes: `quantized`, tokens of each row that lie in the packed part.
    """

    def __init__(self, codecs, residual, batch, spec, max_tokens, dtype, device, *, unit=1, make=None):
        # Along the tokens no group means all of them as one; but fp8 without a group has no scale at all.
        along = [c for c in codecs if c.group_dim == -2 and (c.group or not c.name.startswith("fp8"))]
        self.codecs, self.widths = codecs, (spec.head_dim, spec.v_head_dim)
        self.unit = math.lcm(unit, *(c.group or max_tokens for c in along))
        self.residual = residual
        capacity = max(0, max_tokens - residual) // self.unit * self.unit
        room = min(max_tokens, residual + self.unit - 1)
        shape = batch, spec.kv_heads
        self.tail_k = torch.zeros(*shape, room, spec.head_dim, dtype=dtype, device=device)
        self.tail_v = torch.zeros(*shape, room, spec.v_head_dim, dtype=dtype, device=device)
        make = make or Packed
        self.k, self.v = (make(c, shape, capacity, self.unit, w, device) for c, w in zip(codecs, self.widths))
        self.quantized = [0] * batch

    def fork(self, blocks: Callable[[int], Sequence[int]]) -> "TailedLayer":
        """A layer with its own tail over the same packed blocks, which are found through `blocks`."""
        twin = copy.copy(self)
        twin.tail_k, twin.tail_v = self.tail_k.clone(), self.tail_v.clone()
        twin.quantized = list(self.quantized)
        twin.k, twin.v = copy.copy(self.k), copy.copy(self.v)
        twin.k.blocks = twin.v.blocks = blocks
        return twin

    def write(self, k: Tensor, v: Tensor, before: list[int], new: list[int]) -> None:
        even = len(set(before)) == len(set(new)) == len(set(self.quantized)) == 1
        for rows in [slice(0, len(new))] if even else [slice(b, b + 1) for b in range(len(new))]:
            self._write(rows, k[rows], v[rows], before[rows.start], new[rows.start])

    def _write(self, rows: slice, k: Tensor, v: Tensor, before: int, new: int) -> None:
        done = self.quantized[rows.start]
        waiting = before - done
        whole = max(0, waiting + new - self.residual) // self.unit * self.unit
        for tail, packed, x in ((self.tail_k, self.k, k), (self.tail_v, self.v, v)):
            if not whole:
                tail[rows, :, waiting : waiting + new] = x[:, :, :new]
                continue
            x = torch.cat([tail[rows, :, :waiting], x[:, :, :new]], dim=2)
            packed.write(rows, done, x[:, :, :whole])
            rest = x.shape[2] - whole
            tail[rows, :, :rest] = x[:, :, whole:]
            tail[rows, :, rest:] = 0
        for row in range(rows.start, rows.stop):
            self.quantized[row] = done + whole

    def tile(self, a: int, b: int) -> tuple[Tensor, Tensor]:
        """Dequantized keys and values of packed tokens a to b - 1, every row."""
        return self.k.read(a, b), self.v.read(a, b)

    def views(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The fields of packed keys and values as kernels read them."""
        k, v = ({name: packed.kernel_view(name) for name in packed.fields} for packed in (self.k, self.v))
        return k, v

    def table(self) -> Tensor | None:
        """The rows' blocks, int32 (B, columns), for pages."""
        return self.k.table()

    def recent(self, rows, step, device) -> tuple[Tensor, Tensor, Tensor]:
        """What is in full precision: keys, values, and the position of each, -1 where a row has none."""
        done = self.quantized
        old = [
            n - q if step is None else max(0, s - q) for n, q, s in zip(rows, done, step[2] if step else rows)
        ]
        width = max(old)
        held = torch.arange(width, device=device).expand(len(rows), -1)
        start, count = (torch.tensor(x, device=device)[:, None] for x in (done, old))
        held = torch.where(held < count, held + start, -1)
        k, v = self.tail_k[:, :, :width], self.tail_v[:, :, :width]
        if step is None:
            return k, v, held
        fresh_k, fresh_v, before = step
        at = (
            torch.arange(fresh_k.shape[2], device=device)[None] + torch.tensor(before, device=device)[:, None]
        )
        at = torch.where(at < torch.tensor(rows, device=device)[:, None], at, -1)
        return torch.cat([k, fresh_k], 2), torch.cat([v, fresh_v], 2), torch.cat([held, at], 1)

    def drop(self, row: int, start: int, stop: int) -> None:
        done = self.quantized[row]
        if start < done:
            self.quantized[row] = start
            self.tail_k[row], self.tail_v[row] = 0, 0
        else:
            self.tail_k[row, :, start - done : stop - done] = 0
            self.tail_v[row, :, start - done : stop - done] = 0

    @property
    def nbytes(self) -> int:
        return self.tail_k.nbytes + self.tail_v.nbytes + self.k.nbytes + self.v.nbytes

    def used(self, rows: list[int]) -> int:
        """Bytes that hold tokens."""
        width = (
            (self.tail_k.shape[3] + self.tail_v.shape[3]) * self.tail_k.element_size() * self.tail_k.shape[1]
        )
        waiting = sum(n - q for n, q in zip(rows, self.quantized))
        return sum(self.quantized) // self.unit * (self.k.unit_bytes + self.v.unit_bytes) + waiting * width


class Packed:
    """Room for `capacity` quantized tokens per row: the fields of a QuantizedTensor, tokens on axis -2."""

    def __init__(self, codec: Codec, shape, capacity: int, unit: int, width: int, device):
        self.codec, self.unit, self.width = codec, unit, width
        sample = codec.quantize(torch.zeros(*shape, unit, width, device=device))  # raises for a bad group
        self.whole = sample.tensor_scale
        found = {name: getattr(sample, name) for name in FIELDS}
        self.lines = {name: f.shape[-2] for name, f in found.items() if f is not None}  # of a field, per unit
        self.fields = {name: self._room(found[name], capacity) for name in self.lines}
        self.unit_bytes = sum(found[name][0].nbytes for name in self.lines)

    def _room(self, sample: Tensor, capacity: int) -> Tensor:
        B, heads, lines, width = sample.shape
        return sample.new_zeros(B, heads, lines * (capacity // self.unit), width)

    def write(self, rows: slice, start: int, x: Tensor) -> None:
        """x (b, H, n, D), whole units, for these rows, behind `start` tokens."""
        new = self.codec.quantize(x)
        for name, store in self.fields.items():
            at, piece = start // self.unit * self.lines[name], getattr(new, name)
            store[rows, :, at : at + piece.shape[-2]] = piece

    def read(self, a: int, b: int) -> Tensor:
        """Tokens a to b - 1 of every row as float32, (B, H, b - a, D); dequantized in whole units."""
        low, high = a // self.unit, -(-b // self.unit)
        parts = {name: self._units(name, low, high) for name in self.fields}
        shape = (*parts["codes"].shape[:2], (high - low) * self.unit, self.width)
        fields = (parts.get(name) for name in FIELDS)
        y = self.codec.dequantize(QuantizedTensor(*fields, self.whole, shape, torch.float32))
        return y[:, :, a - low * self.unit : b - low * self.unit]

    def _units(self, name: str, low: int, high: int) -> Tensor:
        return self.fields[name][:, :, low * self.lines[name] : high * self.lines[name]]

    def kernel_view(self, name: str) -> Tensor:
        """A field as the kernels read it, (B, tokens, H, width); in pages, (num_blocks, lines, H, width)."""
        return self.fields[name].transpose(1, 2)

    def table(self) -> Tensor | None:
        """The rows' blocks, int32 (B, columns), for pages."""
        return None

    @property
    def nbytes(self) -> int:
        whole = 0 if self.whole is None else self.whole.nbytes
        return sum(f.nbytes for f in self.fields.values()) + whole


class PagedPacked(Packed):
    """The same in blocks of `unit` tokens: fields are (H, num_blocks, lines, width).

    blocks(row) gives the block numbers of a row, in order; several rows may name the same block.
    """

    def __init__(self, *args, num_blocks: int, blocks: Callable[[int], Sequence[int]]):
        self.num_blocks, self.blocks = num_blocks, blocks
        self.batch = args[1][0]
        super().__init__(*args)

    def _room(self, sample: Tensor, capacity: int) -> Tensor:
        _, heads, lines, width = sample.shape
        return sample.new_zeros(heads, self.num_blocks, lines, width)

    def write(self, rows: slice, start: int, x: Tensor) -> None:
        new, first = self.codec.quantize(x), start // self.unit
        for i, row in enumerate(range(rows.start, rows.stop)):
            ids = list(self.blocks(row)[first : first + x.shape[2] // self.unit])
            for name, store in self.fields.items():
                store[:, ids] = getattr(new, name)[i].unflatten(1, (-1, self.lines[name]))

    def _units(self, name: str, low: int, high: int) -> Tensor:
        B = self.batch
        table = [list(self.blocks(row)[low:high]) for row in range(B)]
        table = [ids + [0] * (high - low - len(ids)) for ids in table]  # a shorter row; masked by its length
        store = self.fields[name]
        index = torch.tensor(table, dtype=torch.long, device=store.device)
        return store[:, index.flatten()].unflatten(1, (B, -1)).transpose(0, 1).flatten(2, 3)

    def kernel_view(self, name: str) -> Tensor:
        return self.fields[name].permute(1, 2, 0, 3)

    def table(self) -> Tensor:
        ids = [list(self.blocks(row)) for row in range(self.batch)]
        padded = [row + [-1] * (max(map(len, ids)) - len(row)) for row in ids]
        return torch.tensor(padded, dtype=torch.int32, device=self.fields["codes"].device)
