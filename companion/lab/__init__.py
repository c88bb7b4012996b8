"""Check it on your own hardware: probes, sweeps with the prediction made first, verdicts, a report.

    from companion.lab import Endpoint, EndpointTarget, Study, context_points, shuffled, sweep
    target = EndpointTarget(Endpoint("http://127.0.0.1:8000"))
    result = sweep(target, shuffled(context_points([128, 512, 2048]), 3, seed=1), Study("lab.json", {}))

The client, the fits, the verdicts and the report use the standard library only; torch is imported when a
model on this machine is measured.
"""

from typing import TYPE_CHECKING

from .answers import Answer, Fault
from .client import Endpoint, EndpointTarget
from .fit import Estimate, Verdict, line, mean, parabola, ratio, verdict
from .points import Point, Run, Shape, batch_points, context_points, pair_points, prefix_points, shuffled
from .probes import Probe, Stopwatch, hardware_from, probe
from .reports import report, write_report
from .studies import Study, sweep

if TYPE_CHECKING:
    from .local import DecoderTarget, TransformersTarget, Variant

__all__ = [
    "Answer",
    "DecoderTarget",
    "Endpoint",
    "EndpointTarget",
    "Estimate",
    "Fault",
    "Point",
    "Probe",
    "Run",
    "Shape",
    "Stopwatch",
    "Study",
    "TransformersTarget",
    "Variant",
    "Verdict",
    "batch_points",
    "context_points",
    "hardware_from",
    "line",
    "mean",
    "pair_points",
    "parabola",
    "prefix_points",
    "probe",
    "ratio",
    "report",
    "shuffled",
    "sweep",
    "verdict",
    "write_report",
]


def __getattr__(name: str):
    if name in ("DecoderTarget", "TransformersTarget", "Variant"):
        from . import local

        return getattr(local, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
