"""What a server does with the cache: many requests on one model and one pool of blocks.

    scheduler   who computes what in the next step; standard library only
    simulation  the same scheduler with a clock that a cost model turns: what to expect before it is measured
    packed      all tokens of a step in one pass, without padding
    forward     the model's part of a step: logits and the tokens chosen from them
    engine      requests in, tokens out
    page        the simulation for a page in a browser

Names load when first used: the scheduler and the simulation need no torch.
"""

import importlib

_NAMES = {
    "Arrival": "simulation",
    "Chunk": "scheduler",
    "Completion": "request",
    "Engine": "engine",
    "Event": "request",
    "Part": "records",
    "Plan": "scheduler",
    "Refused": "scheduler",
    "Request": "request",
    "Scheduler": "scheduler",
    "Step": "records",
    "Timeline": "simulation",
    "live": "page",
    "roofline": "simulation",
    "simulate": "simulation",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
