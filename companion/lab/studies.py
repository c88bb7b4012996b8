"""One JSON file per study, whole at every moment: what was planned, predicted, measured and concluded.

A prediction is written before the first run of its sweep, and is never written again. The file is replaced
as a whole after every run, so that an interruption loses the run in progress and nothing else.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..cost import HardwareSpec
from .conclude import conclude
from .points import Point, Run, Shape, predict_all

FORMAT, VERSION = "companion lab", 1


class Study:
    """A study in a file: begun anew, or gone on with.

    path      the file; its folder must exist
    settings  what was asked for. A file begun with other settings is not gone on with: its numbers would mix

    A new file is written with the first fact or plan: what fails before leaves nothing behind.
    Raises ValueError if the folder is not there, and if the file is no study, a newer one, or has other
    settings; the file is left as it is.
    """

    def __init__(self, path: str | Path, settings: Mapping):
        self.path = Path(path)
        settings = json.loads(json.dumps(settings))
        if not self.path.parent.is_dir():
            raise ValueError(f"{self.path}: there is no folder {self.path.parent}")
        self.resumed = self.path.exists()
        if self.resumed:
            self.data = read(self.path)
            old = self.data["settings"]
            for k in sorted({*settings, *old}):
                if settings.get(k) != old.get(k):
                    raise ValueError(
                        f"{self.path} was begun with {k}={old.get(k)!r}, and now it is {settings.get(k)!r}; "
                        "give another file, or the same settings"
                    )
        else:
            self.data = {
                "format": FORMAT,
                "version": VERSION,
                "begun": now(),
                "settings": settings,
                "sweeps": {},
            }

    def note(self, **facts) -> None:
        """Keep facts on the machine and the target, unless they are there already."""
        self.data |= {k: v for k, v in facts.items() if k not in self.data}
        self.save()

    def begin(
        self,
        sweep: str,
        points: list[Point],
        predicted: Mapping[str, dict],
        variants: Sequence[str] = ("base",),
    ) -> None:
        """Write down what is planned and predicted, before anything of it is measured.

        What an earlier session wrote stays: more rounds or contexts are added to it, and a prediction once
        made is never made again. variants: what is compared, the one that others are compared with first.
        """
        entry = self.data["sweeps"].setdefault(
            sweep,
            {
                "predicted_at": now(), "predicted": {}, "variants": list(variants), "plan": [],
                "runs": {}, "faults": {},
            },
        )  # fmt: skip
        entry["predicted"] = {**predicted, **entry["predicted"]}
        known = {p["id"] for p in entry["plan"]}
        entry["plan"] += [vars(p) | {"id": p.id, "group": p.group} for p in points if p.id not in known]
        self.save()

    def missing(self, sweep: str, points: list[Point]) -> list[Point]:
        """The points without a result, in their order."""
        done = self.data["sweeps"][sweep]["runs"]
        return [p for p in points if p.id not in done]

    def add(self, sweep: str, point: Point, run: Run) -> None:
        """Keep what came of a point: a result, or a fault in a list of its own."""
        entry = self.data["sweeps"][sweep]
        if run.fault is None:
            entry["runs"][point.id] = run.to_dict() | {"at": now()}
            entry["faults"].pop(point.id, None)
        else:
            entry["faults"][point.id] = run.fault
        self.save()

    def conclude(self, sweep: str, result: Mapping) -> None:
        """Store what a sweep came to, and save."""
        self.data["sweeps"][sweep]["result"] = dict(result)
        self.save()

    def discard(self) -> None:
        """Remove the file, if this study began it and nothing has been measured."""
        if not self.resumed and not any(entry["runs"] for entry in self.data["sweeps"].values()):
            self.path.unlink(missing_ok=True)

    def save(self) -> None:
        """The file as a whole, or as it was."""
        replace_file(self.path, json.dumps(self.data, indent=1, allow_nan=False))


def replace_file(path: Path, text: str) -> None:
    """Write beside the file, then put it in the file's place."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(partial, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: str | Path) -> dict:
    """A study's data. Raises ValueError, naming the file, if it is none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} is no JSON; nothing was changed") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} holds no study of this lab; nothing was changed")
    if data.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {data.get('version')!r} of the format; this lab reads {VERSION}"
        )
    _check(path, data)
    return data


def _check(path: str | Path, data: dict) -> None:
    """Raise a ValueError if something that every study of this version has is not there."""
    sweeps = data.get("sweeps")
    parts = {"predicted": dict, "variants": list, "plan": list, "runs": dict, "faults": dict}
    whole = isinstance(data.get("settings"), dict) and isinstance(sweeps, dict)
    whole = whole and all(
        isinstance(entry, dict) and all(isinstance(entry.get(k), kind) for k, kind in parts.items())
        for entry in sweeps.values()
    )
    if not whole:
        raise ValueError(f"{path} is a study with parts missing; nothing was changed")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


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
