"""Companion package of *What a Token Costs*.

Importing it costs nothing: public names load when first used, so that sizing a
deployment needs neither torch nor triton.
"""

import importlib

__version__ = "0.1.0"

_MODULES = (
    "attention",
    "caches",
    "cli",
    "cost",
    "doctor",
    "engine",
    "figures",
    "generate",
    "kernels",
    "lab",
    "live",
    "machine",
    "model",
    "moe",
    "paging",
    "parallel",
    "quantize",
    "rope",
    "serving",
    "stats",
    "study",
)

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"companion.{name}")
    raise AttributeError(f"module 'companion' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
