"""How many tokens to draft in a pass: a fixed number, or what has lately been worth its price.

A draft pays where the tokens it is expected to bring outweigh what more rows cost: that is
`companion.cost.best_draft_length`, fed with the acceptance seen so far. Nothing here looks at a clock, so
that the same seed gives the same text on every day; prices are given, or measured once beforehand.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping

import torch

from ..caches import make_cache
from ..checks import is_number, require, whole
from ..cost.step import best_draft_length
from ..model import Decoder


class Fixed:
    """Always `longest` tokens."""

    def __init__(self, longest: int):
        self.longest = whole("draft_tokens", longest)

    def begin(self, model: Decoder) -> None:
        """A new text starts."""

    def chosen(self, kind: Hashable, draft_cost: float) -> int:
        """Tokens to check in this pass, of a draft of this kind and price per token."""
        return self.longest

    def learn(self, kind: Hashable, accepted: int, tested: int) -> None:
        """Of `tested` drafted tokens that were judged, `accepted` stood."""


class Adaptive(Fixed):
    """As many as pay, up to `longest`; none where none does.

    pass_cost: time of a pass of so many rows, in passes of one row: a function, or a table {rows: price}
        whose gaps are filled by the next larger entry; see `measure_pass_cost`. None: 1 + 0.02 per further
        row on a GPU, and 1.5 + 0.1 per further row on a CPU, whose products slow down at the second row.
    memory: how much of what was seen still counts after another draft was judged, 0 to below 1.

    Acceptance is estimated for each kind of draft apart (an n-gram draft has two kinds, short and longer
    endings). A look-up costs nothing, so it is compared with what the target says even while it is not
    used, and is used once it would have been right. A draft that costs something is used from the start, and
    after it did not pay it is tried again after 8, 16, 32 ... 256 passes.
    """

    def __init__(
        self,
        longest: int = 8,
        *,
        pass_cost: Callable[[int], float] | Mapping[int, float] | None = None,
        memory: float = 0.7,
    ):
        super().__init__(longest)
        require(is_number(memory) and 0 <= memory < 1, "memory", "a number from 0 to below 1", memory)
        if isinstance(pass_cost, Mapping):
            whole("last row of pass_cost", max(pass_cost, default=0), longest + 1)
        self.memory, self._given = memory, pass_cost

    def begin(self, model):
        table = self._given
        if table is None:
            first, further = (1.5, 0.1) if model.device.type == "cpu" else (1.0, 0.02)
            self._price = lambda rows: 1.0 if rows == 1 else first + further * (rows - 1)
        elif isinstance(table, Mapping):
            self._price = lambda rows: 1.0 if rows == 1 else table[min(r for r in table if r >= rows)]
        else:
            self._price = table
        self._seen: dict[Hashable, tuple[float, float]] = {}  # kind -> accepted, tested; old ones fade
        self._best: dict[tuple, int] = {}
        self._pause = self._left = 0  # passes to wait after a costly draft that did not pay

    def chosen(self, kind, draft_cost):
        if self._left:
            self._left -= 1
            return 0
        n = self._length(kind, draft_cost)
        if n or not draft_cost:
            return n
        # Forget enough for one more try, and wait for it: twice as long as the last time.
        self._seen.pop(kind, None)
        self._pause = min(256, 2 * self._pause) or 8
        self._left = self._pause - 1
        return 0

    def _length(self, kind, draft_cost) -> int:
        # Before anything is seen: a free draft must prove itself, a costly one can only by being used.
        first = (0.8, 1.0) if draft_cost else (0.6, 2.0)
        accepted, tested = self._seen.get(kind, (0.0, 0.0))
        alpha = round((accepted + first[0]) / (tested + first[1]), 2)
        key = alpha, draft_cost
        if key not in self._best:
            self._best[key] = best_draft_length(
                alpha, pass_cost=self._price, draft_cost=draft_cost, longest=self.longest
            )
        return self._best[key] if tested else min(2, self._best[key])

    def learn(self, kind, accepted, tested):
        a, t = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = a * self.memory + accepted, t * self.memory + tested
        if accepted == tested:
            self._pause = 0


@torch.inference_mode()
def measure_pass_cost(
    model: Decoder, longest: int = 8, *, context: int = 256, rounds: int = 5
) -> dict[int, float]:
    """{rows: time of a pass of so many rows, in passes of one} for 1 to longest + 1 rows, on this machine.

    context: tokens in the cache before the pass. Medians of `rounds` rounds in which all sizes take turns,
    and never less for more rows. Takes about rounds * 2 * longest single passes.
    """
    cache = make_cache(
        "contiguous", model.spec, max_tokens=context + longest + 1, dtype=model.dtype, device=model.device
    )
    ids = torch.arange(context + longest + 1, device=model.device)[None] % model.spec.vocab
    model(ids[:, :context], cache, logits="last")
    seconds: dict[int, list[float]] = {rows: [] for rows in range(1, longest + 2)}
    for _ in range(rounds + 1):
        for rows, times in seconds.items():
            started = time.perf_counter()
            model(ids[:, :rows], cache)[0, -1, 0].item()  # .item() waits for a GPU
            times.append(time.perf_counter() - started)
            cache.crop(context)
    medians = [statistics.median(times[1:]) for times in seconds.values()]  # the first round warms up
    return {rows: max(medians[:rows]) / medians[0] for rows in seconds}
