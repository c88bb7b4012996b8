"""A group of ranks that speak to each other, and keep count of every byte they hand over.

    group = join(timeout=30.0)     # under torchrun; alone, a group of one that needs no torch.distributed
    y = group.all_reduce(x)
    group.by_kind                  # {"all_reduce": (1, x.nbytes)}: calls and payload of this rank

Payload is the bytes of the tensor that a rank hands in (what that puts on the wire: `companion.cost.wire`).
Results are on x's device, and pass no gradient. All ranks of a group must make the same calls in the
same order.

A rank that dies, or never comes, is an error on the others: as soon as its connection closes, and otherwise
after `timeout` seconds in the call that waits for it. A group that has lost a rank is of no use any more.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from ..checks import choice, positive, require, whole

Number = int | float
SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)


class RankLost(RuntimeError):
    """A collective did not come to an end: a rank has died, is stuck, or made another call."""


@dataclass(frozen=True)
class Call:
    """One collective as this rank saw it.

    kind: "all_reduce", "all_to_all", "all_gather" or "broadcast". payload: bytes that this rank handed in (a
    broadcast's receivers hand in none). received: bytes that it got back. abroad: of the payload, what was
    not for itself; for a reduction, which has no addressee, all of it. what: the purpose that the caller
    named.
    """

    kind: str
    payload: int
    received: int
    abroad: int
    what: str = ""


class Group:
    """`size` ranks, of which this one is `rank`; made by `join`, or `Group()` for one rank alone.

    Attributes: `rank`, `size`, `timeout` in seconds, `calls`, a list of `Call` that grows; a group of one
    makes no calls, so nothing is counted.
    """

    def __init__(self, process_group: Any = None, *, timeout: Number = 30.0):
        self.process_group, self.timeout = process_group, timeout
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.calls: list[Call] = []

    def all_reduce(self, x: Shaped[Tensor, "..."], what: str = "") -> Shaped[Tensor, "..."]:
        """The sum of all ranks' x, of one shape; the same bits on every rank.

        Raises ValueError for a dtype that is none of float64, float32, bfloat16, float16, int64 and int32.
        """
        choice("dtype of x", x.dtype, SUMMED)
        if self.size == 1:
            return x
        out = x.clone(memory_format=torch.contiguous_format)
        self._do("all_reduce", what, 3 * (x.nbytes,), dist.all_reduce, out)
        return out

    def all_gather(self, x: Shaped[Tensor, "..."], what: str = "") -> Shaped[Tensor, "..."]:
        """(n, ...): the x of every rank, all of one shape, in the order of ranks."""
        if self.size == 1:
            return x[None]
        out = x.new_empty(self.size, *x.shape)
        moved = x.nbytes, self.size * x.nbytes, x.nbytes
        self._do("all_gather", what, moved, dist.all_gather, list(_bytes(out).chunk(self.size)), _bytes(x))
        return out

    def broadcast(self, x: Shaped[Tensor, "..."], source: int = 0, what: str = "") -> Shaped[Tensor, "..."]:
        """The x of rank `source`; the others give one of the same shape and dtype, whatever it holds."""
        whole("source", source, 0, self.size - 1)
        if self.size == 1:
            return x
        out = x.clone(memory_format=torch.contiguous_format)
        sent = x.nbytes if self.rank == source else 0
        moved = sent, x.nbytes - sent, sent
        self._do("broadcast", what, moved, dist.broadcast, _bytes(out), group_src=source)
        return out

    def all_to_all(
        self, x: Shaped[Tensor, "..."], send: Sequence[int], receive: Sequence[int], what: str = ""
    ) -> Shaped[Tensor, "..."]:
        """Rows (R, ...): the first send[0] rows of x go to rank 0, the next send[1] to rank 1, and so on.

        receive: how many rows come from each rank: what it has for this one in its `send`. Zeros are allowed,
        for all ranks too. Returns what came, in the order of ranks. Raises ValueError, before anything is
        sent, for counts that do not fit x or the group.
        """
        for name, counts in (("send", send), ("receive", receive)):
            fits = len(counts) == self.size and all(n >= 0 for n in counts)
            require(fits, name, f"{self.size} counts of rows, one per rank", list(counts))
        require(sum(send) == x.shape[0], "send", f"counts that add up to {x.shape[0]} rows", list(send))
        if self.size == 1:
            alike = list(send) == list(receive)
            require(alike, "receive", f"send={list(send)} in a group of one", list(receive))
            return x
        out = x.new_empty(sum(receive), *x.shape[1:])
        row = math.prod(x.shape[1:]) * x.itemsize
        splits = [n * row for n in receive], [n * row for n in send]
        moved = x.nbytes, out.nbytes, row * (x.shape[0] - send[self.rank])
        self._do("all_to_all", what, moved, dist.all_to_all_single, _bytes(out), _bytes(x), *splits)
        return out

    @property
    def payload(self) -> int:
        """Bytes that this rank has handed in so far."""
        return sum(c.payload for c in self.calls)

    @property
    def by_kind(self) -> dict[str, tuple[int, int]]:
        """kind -> (calls, payload) so far."""
        return self._table("kind")

    @property
    def by_purpose(self) -> dict[str, tuple[int, int]]:
        """Purpose -> (calls, payload) so far."""
        return self._table("what")

    def _table(self, by: str) -> dict[str, tuple[int, int]]:
        found: dict[str, list[int]] = {}
        for c in self.calls:
            found.setdefault(getattr(c, by), []).append(c.payload)
        return {key: (len(payloads), sum(payloads)) for key, payloads in found.items()}

    def _do(self, kind: str, what: str, moved: tuple[int, int, int], collective, *args, **options) -> None:
        """Run a collective and count it. moved: bytes of its payload, received, abroad."""
        try:
            collective(*args, group=self.process_group, **options)
        except RuntimeError as e:
            purpose = f" ({what})" if what else ""
            raise RankLost(
                f"rank {self.rank} of {self.size}: {kind}{purpose} did not end within {self.timeout} s, or a "
                f"connection closed; a rank has died, is stuck, or is in another call: {e}"
            ) from e
        self._count(kind, *moved, what)

    def _count(self, kind: str, payload: int, received: int, abroad: int, what: str) -> None:
        self.calls.append(Call(kind, payload, received, abroad, what))

    def __deepcopy__(self, memo) -> "Group":
        return self  # connections cannot be copied; a copied model speaks through the same ones


def join(
    *,
    timeout: Number = 30.0,
    device: torch.device | str = "cpu",
    rank: int | None = None,
    size: int | None = None,
    store: Any = None,
) -> Group:
    """The group of all ranks of this run; a group of one where there is only one.

    timeout: seconds after which a wait for another rank is given up, the first one included. device: where
    tensors will be; "cuda" uses NCCL, all else gloo. rank, size: None reads RANK and WORLD_SIZE, which
    torchrun sets. store: a torch.distributed store to meet at; None meets at MASTER_ADDR and MASTER_PORT.

    Raises ValueError for arguments that do not fit each other, and RankLost if not all ranks come in time.
    """
    positive("timeout", timeout)
    if (rank is None) != (size is None):
        raise ValueError(f"rank and size must be given both or neither, got {rank} and {size}")
    if rank is None:
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    whole("rank", rank, 0, whole("size", size) - 1)
    if size == 1:
        return Group(timeout=timeout)
    if not dist.is_available():
        raise ValueError(f"size must be 1, as this torch has no torch.distributed, got {size}")
    cuda = torch.device(device).type == "cuda"
    if cuda:  # else every rank would put its buffers on the first device
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
    try:
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=size,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
    except RuntimeError as e:
        raise RankLost(f"rank {rank}: not all of {size} ranks came within {timeout} s: {e}") from e
    return Group(dist.group.WORLD, timeout=timeout)


def mesh(world: Group, tensor: int) -> tuple[Group, Group]:
    """(tensor, expert): two groups for this rank, out of tensor x expert = world.size ranks.

    Ranks that follow one another share tokens: of 4 ranks with tensor=2, {0, 1} and {2, 3} are tensor groups
    and {0, 2} and {1, 3} expert groups. All ranks of `world` must call this. Raises ValueError for a tensor
    that does not divide the world.
    """
    divides = world.size % whole("tensor", tensor) == 0
    require(divides, "tensor", f"a divisor of the {world.size} ranks", tensor)
    expert = world.size // tensor
    rows = [list(range(i * tensor, (i + 1) * tensor)) for i in range(expert)]
    columns = [list(range(j, world.size, tensor)) for j in range(tensor)]
    return _own(world, rows), _own(world, columns)


def _own(world: Group, parts: list[list[int]]) -> Group:
    """This rank's group among `parts`; every rank must name them all, in one order."""
    if len(parts) == 1:
        return Group(world.process_group, timeout=world.timeout)
    if len(parts[0]) == 1:
        return Group(timeout=world.timeout)
    limit = timedelta(seconds=world.timeout)
    groups = [dist.new_group(part, timeout=limit) for part in parts]
    return next(Group(g, timeout=world.timeout) for g, part in zip(groups, parts) if world.rank in part)


def _bytes(x: Tensor) -> Tensor:
    """The memory of x, or of a copy in one piece: what is only moved may have any dtype."""
    return x.contiguous().view(-1).view(torch.uint8)


def leave() -> None:
    """Close the connections of all groups of this process; nothing happens where there are none."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
