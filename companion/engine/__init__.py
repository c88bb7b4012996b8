"""What a server does with the cache: many requests on one model and one pool of blocks.

    forward     the model's part of a step: all tokens in one pass without padding, logits, the tokens chosen
    engine      requests in, tokens out

What an engine decides without tensors, the scheduler and its simulation, is `companion.serving`; its names
are here too. What needs torch loads when first used.
"""

import importlib
from typing import TYPE_CHECKING

from ..serving import Arrival, Chunk, Part, Plan, Refused, Scheduler, Step, Timeline, roofline, simulate

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
