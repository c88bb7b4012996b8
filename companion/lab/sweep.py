"""Take a sweep's measurements: predict, store, then run what is missing, one point at a time."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from ..cost import HardwareSpec
from .conclude import conclude
from .points import Point, Run
from .predict import Shape, predict_all
from .store import Study

GIVE_UP = 3  # faults in a row


@runtime_checkable
class Target(Protocol):
    """What is measured. shapes: its model by variant, empty where it is not known."""

    shapes: dict[str, Shape]

    def describe(self) -> dict:
        """Facts about what is measured, for the study's file: its kind, device and variants."""
        ...

    def warm_up(self) -> None:
        """What happens once and is in no measurement. Raises ValueError if nothing can be measured."""
        ...

    def measure(self, point: Point) -> Run:
        """One run of `point`; where there is none, the run's `fault` says why."""
        ...


def sweep(
    target: Target,
    points: Sequence[Point],
    study: Study,
    *,
    hardware: HardwareSpec | None = None,
    on_progress: Callable[[int, int, Point, Run | None], None] | None = None,
) -> dict:
    """Measure the points, all of one sweep, that `study` has no result for; returns fits and verdicts.

    The predictions are stored before anything is measured. on_progress(done, total, point, run) is called
    before each run (run None) and after it. Three faults in a row end the sweep: the rest is left for
    another day, and the conclusions say what is missing.
    """
    points = list(points)
    names = {p.sweep for p in points}
    if len(names) != 1:
        raise ValueError(f"points of one sweep are needed, got {', '.join(sorted(names)) or 'none'}")
    (name,) = names
    used = {p.variant for p in points}
    variants = [v for v in target.shapes if v in used] + sorted(used - set(target.shapes))
    study.begin(name, points, predict_all(points, target.shapes, hardware), variants)
    missing = study.missing(name, points)
    if missing:
        target.warm_up()
    in_a_row = 0
    for i, point in enumerate(missing):
        done = len(points) - len(missing) + i
        if on_progress:
            on_progress(done, len(points), point, None)
        run = target.measure(point)
        study.add(name, point, run)
        if on_progress:
            on_progress(done + 1, len(points), point, run)
        in_a_row = in_a_row + 1 if run.fault else 0
        if in_a_row == GIVE_UP:
            break
    study.conclude(name, conclude(name, study.data["sweeps"][name]))
    return study.data["sweeps"][name]["result"]
