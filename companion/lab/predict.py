"""What `companion.cost` says about a point, before it is measured."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..cost import HardwareSpec, ModelSpec, decode_step, prefill
from .points import Point

SUFFIX = 16  # tokens of a warm prompt that no cache knows


@dataclass(frozen=True)
class Shape:
    """A model as the cost model sees it: its spec, and the formats of weights, cache and products."""

    spec: ModelSpec
    weight_dtype: str | float = "bf16"  # or bits per value
    kv_dtype: str | float = "bf16"
    compute_dtype: str | None = None

    def to_dict(self) -> dict:
        formats = asdict(self) | {"model": self.spec.name}
        del formats["spec"]
        return formats


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
    formats = {"weight_dtype": shape.weight_dtype, "kv_dtype": shape.kv_dtype}
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
