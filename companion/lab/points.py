"""What a sweep measures, one point at a time, in which order, and what comes back."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Point:
    """One measurement to take.

    variant     what is compared within a sweep: "cold" and "warm", "fp32" and "int8"
    context     tokens in the cache when decoding begins, per sequence
    new_tokens  decode steps timed
    prompt      True: the context is read as a prompt, which gives a TTFT; False: the cache is filled with
                random numbers, which costs a decode step the same and the sweep much less
    round       rounds are shuffled one by one, so that each sees the machine's every mood
    """

    sweep: str
    context: int
    batch: int = 1
    variant: str = "base"
    new_tokens: int = 8
    prompt: bool = True
    round: int = 0

    @property
    def id(self) -> str:
        """The point and its round: the key of its run in a study."""
        return f"{self.group}/r{self.round}"

    @property
    def group(self) -> str:
        """What points of different rounds have in common, and a prediction is made for."""
        return f"{self.variant}/n{self.context}/b{self.batch}{'' if self.prompt else '/filled'}"


@dataclass
class Run:
    """What came of a point. Seconds; None where there is nothing to report.

    itl_s      seconds per decode step: the median of `steps_s` where each step was seen
    context    tokens that really were in the cache when decoding began (a server counts its own)
    tokens_per_second   of the whole batch while all of it was decoding
    fault      why there is no result; such a run is in no fit, and is taken again when a study is resumed
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    steps_s: list[float] = field(default_factory=list)
    context: int | None = None
    tokens: int = 0
    tokens_per_second: float | None = None
    cached_tokens: int | None = None
    fault: str | None = None
    note: str = ""

    def to_dict(self) -> dict:
        return asdict(self)


def shuffled(points: Sequence[Point], rounds: int, seed: int) -> list[Point]:
    """Every point once per round, each round in an order of its own."""
    order, out = random.Random(seed), []
    for r in range(rounds):
        these = [Point(**(asdict(p) | {"round": r})) for p in points]
        order.shuffle(these)
        out += these
    return out


def context_points(
    contexts: Sequence[int], *, new_tokens: int = 8, prompt_limit: int | None = None
) -> list[Point]:
    """TTFT and ITL against context; beyond prompt_limit tokens the cache is filled, and there is no TTFT."""
    return [
        Point("context", n, new_tokens=new_tokens, prompt=prompt_limit is None or n <= prompt_limit)
        for n in contexts
    ]


def batch_points(batches: Sequence[int], *, context: int, new_tokens: int = 8) -> list[Point]:
    """Throughput against batch, at a context short enough for the weights to dominate."""
    return [Point("batch", context, batch=b, new_tokens=new_tokens) for b in batches]


def prefix_points(context: int, *, new_tokens: int = 8) -> list[Point]:
    """The same length of prompt, unknown ("cold") and with all but its ending known ("warm")."""
    return [Point("prefix", context, variant=v, new_tokens=new_tokens) for v in ("cold", "warm")]


def pair_points(
    sweep: str, variants: Sequence[str], contexts: Sequence[int], batches: Sequence[int] = (1,), **options
) -> list[Point]:
    """Decode steps of two variants side by side: precision of the cache, kinds of heads, experts."""
    return [
        Point(sweep, n, batch=b, variant=v, prompt=False, **options)
        for n in contexts
        for b in batches
        for v in variants
    ]
