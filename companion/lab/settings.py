"""What `companion lab` measures unless told: sweeps and sizes for a CPU, a GPU and an endpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

from .points import Point, batch_points, context_points, pair_points, prefix_points, shuffled

REMOTE = ("context", "batch", "prefix")
LOCAL = (*REMOTE, "kv", "weights", "heads", "moe")
PAIRS = {
    "kv": ("full", "int8"), "weights": ("full", "int8"), "heads": ("grouped", "full heads"),
    "moe": ("dense", "mixture"),
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """contexts, batches: for the sweeps against them. short: the context of the batch sweep, long: of the
    others. prompt_limit: contexts beyond it are filled instead of read; None reads all."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    short: int
    long: int
    prompt_limit: int | None
    pair_batches: tuple[int, ...] = (1, 8)

    def within(self, limit: int | None, new_tokens: int) -> "Sizes":
        """The same, with the contexts that a model of this limit takes; at least one is left."""
        if limit is None:
            return self
        most = max(1, limit - new_tokens)
        contexts = tuple(n for n in self.contexts if n <= most) or (most,)
        long, short = min(self.long, most), min(self.short, most)
        return Sizes(contexts, self.batches, short, long, self.prompt_limit, self.pair_batches)


CPU = Sizes((64, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8, 16), 64, 1024, prompt_limit=1024)
READ = Sizes((64, 256, 512, 1024), (1, 2, 4, 8, 16), 64, 1024, prompt_limit=None)  # a CPU that fills none
GPU = Sizes((256, 1024, 2048, 4096, 8192, 16384), (1, 4, 16, 64, 128, 256), 128, 4096, prompt_limit=None)
SERVER = Sizes((128, 256, 512, 1024, 1536), (1, 2, 4, 8), 64, 1024, prompt_limit=None)


def plan(sweep: str, sizes: Sizes, *, rounds: int, new_tokens: int, seed: int) -> list[Point]:
    """The points of one sweep, in the order in which they are taken."""
    if sweep == "context":
        points = context_points(sizes.contexts, new_tokens=new_tokens, prompt_limit=sizes.prompt_limit)
    elif sweep == "batch":
        points = batch_points(sizes.batches, context=sizes.short, new_tokens=new_tokens)
    elif sweep == "prefix":
        points = prefix_points(sizes.long, new_tokens=new_tokens)
    else:
        long, short = sizes.long, sizes.short
        both = sorted({short, long})  # what is saved on weights is the less of a step the more is cached
        contexts = {"kv": [long], "weights": both, "heads": [long], "moe": [short]}[sweep]
        batches = (1,) if sweep == "kv" else sizes.pair_batches
        points = pair_points(sweep, PAIRS[sweep], contexts, batches, new_tokens=new_tokens)
    return shuffled(points, rounds, seed)


def chosen(asked: str | None, known: Sequence[str]) -> list[str]:
    """Names between commas, in the order known. Raises ValueError for one that is not."""
    names = [n.strip() for n in asked.split(",") if n.strip()] if asked else ["context", "batch"]
    if "all" in names:
        names = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"sweeps: {name!r} is none here; accepted: {', '.join(known)}, all")
    if not names:
        raise ValueError(f"sweeps: none named in {asked!r}; accepted: {', '.join(known)}, all")
    return [n for n in known if n in names]
