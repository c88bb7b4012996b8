"""What a sweep measures, one point at a time, in which order, and what comes back."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from ..cost import HardwareSpec, ModelSpec, decode_step, models, prefill


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
        these = [replace(p, round=r) for p in points]
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


REMOTE = ("context", "batch", "prefix")
LOCAL = (*REMOTE, "kv", "weights", "heads", "moe")
PAIRS = {
    "kv": ("full", "int8"), "weights": ("full", "int8"), "heads": ("grouped", "full heads"),
    "moe": ("dense", "mixture"),
}  # fmt: skip
TITLES = {
    "context": "Time to the first token and time per token, against context",
    "batch": "Throughput against batch",
    "prefix": "A prefix that is known, and one that is not",
    "kv": "Precision of the cache",
    "weights": "Precision of the weights, the cache as it was",
    "heads": "Grouped heads against full heads, random weights",
    "moe": "Dense against a mixture of experts of as many active parameters, random weights",
}


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
        return replace(self, contexts=contexts, long=min(self.long, most), short=min(self.short, most))


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


_WORDS = (
    "water stone light house river garden window table summer winter morning evening road field letter "
    "music paper silver island harbour village mountain forest bridge market kitchen doctor teacher farmer "
    "sailor walk open carry follow remember listen build begin small large quiet early heavy narrow warm"
).split()
ASK = "\n\nWrite a long story in which these words appear. Begin at once."


def prompt(words: int, seed: str) -> str:
    """About `words` words after a number that is this seed's own. The same seed gives the same prompt."""
    order = random.Random(seed)
    first = f"{order.getrandbits(64):016x}"
    return " ".join([first, *(order.choice(_WORDS) for _ in range(words))]) + ASK


def other_ending(text: str, seed: str) -> str:
    """The same prompt up to its last words."""
    return f"{text} The first name in it is {prompt(2, seed).split()[1]}."


SUFFIX = 16  # tokens of a warm prompt that no cache knows


@dataclass(frozen=True)
class Shape:
    """A model as the cost model sees it: its spec, and the formats of weights, cache and products."""

    spec: ModelSpec
    weights: str | float = "bf16"  # or bits per value
    kv: str | float = "bf16"
    compute_dtype: str | None = None

    def to_dict(self) -> dict:
        formats = asdict(self) | {"model": self.spec.name}
        del formats["spec"]
        return formats


def with_heads(spec: ModelSpec, kv_heads: int) -> ModelSpec:
    """The same model with another number of key-value heads."""
    return replace(spec, name=f"{spec.name}, {kv_heads} key heads", kv_heads=kv_heads)


def as_mixture(spec: ModelSpec, experts: int, top_k: int) -> ModelSpec:
    """A mixture with as many parameters active per token: an expert has 1 / top_k of the width.

    Raises ValueError if top_k does not divide the feed-forward width.
    """
    if spec.ffn % top_k:
        raise ValueError(f"top_k={top_k} does not divide the feed-forward width {spec.ffn}")
    moe = replace(models["mixtral-8x7b"].moe, experts=experts, top_k=top_k, ffn=spec.ffn // top_k)
    return replace(spec, name=f"{spec.name}, {experts} experts", architecture="mixtral", moe=moe)


@dataclass(frozen=True)
class Prediction:
    """Seconds and tokens per second; lower bounds of the time, from bandwidth and peak alone."""

    ttft_s: float | None
    itl_s: float
    tokens_per_second: float
    bound_by: str

    def to_dict(self) -> dict:
        return asdict(self)


def predict(point: Point, shape: Shape, hardware: HardwareSpec) -> Prediction:
    """The time of the first token and of a step in the middle of those that are timed."""
    formats = {"weights": shape.weights, "kv": shape.kv}
    formats["compute_dtype"] = shape.compute_dtype
    middle = point.context + (point.new_tokens + 1) // 2
    step = decode_step(shape.spec, hardware, point.batch, middle, **formats)
    ttft = None
    if point.prompt:
        cached = max(0, point.context - SUFFIX) if point.variant == "warm" else 0
        new = point.context - cached
        ttft = prefill(shape.spec, hardware, new, cached=cached, batch=point.batch, **formats).seconds
    return Prediction(ttft, step.seconds, step.tokens_per_second, step.bound_by)


def predict_all(
    points: Sequence[Point], shapes: dict[str, Shape], hardware: HardwareSpec | None
) -> dict[str, dict]:
    """A prediction for each group of points; none where neither model nor device is known.

    shapes: by variant, "base" for those that have none of their own.
    """
    found = {}
    for point in points:
        shape = shapes.get(point.variant, shapes.get("base"))
        if hardware is not None and shape is not None:
            found[point.group] = predict(point, shape, hardware).to_dict()
    return found
