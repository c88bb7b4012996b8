"""What a server does with the cache: many requests on one model and one pool of blocks.

    scheduler   who computes what in the next step; standard library only
    simulation  the same scheduler with a clock that a cost model turns: what to expect before it is measured
    packed      all tokens of a step in one pass, without padding
    forward     the model's part of a step: logits and the tokens chosen from them
    engine      requests in, tokens out
    page        the simulation for a page in a browser

What needs torch loads when first used: the scheduler and the simulation do without.
"""

import importlib
from typing import TYPE_CHECKING

from .page import live
from .records import Part, Step
from .scheduler import Chunk, Plan, Refused, Scheduler
from .simulation import Arrival, Timeline, roofline, simulate

if TYPE_CHECKING:
    from .engine import Engine
    from .request import Completion, Event, Request

__all__ = [
    "Arrival",
    "Chunk",
    "Completion",
    "Engine",
    "Event",
    "Part",
    "Plan",
    "Refused",
    "Request",
    "Scheduler",
    "Step",
    "Timeline",
    "live",
    "roofline",
    "simulate",
]

_TORCH = {"Engine": "engine", "Completion": "request", "Event": "request", "Request": "request"}


def __getattr__(name: str):
    if name in _TORCH:
        return getattr(importlib.import_module(f"{__name__}.{_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
