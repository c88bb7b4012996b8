"""Companion package of *What a Token Costs*.

Importing it costs nothing: public names load when first used, so that sizing a
deployment needs neither torch nor triton.
"""

import importlib

__version__ = "0.1.0"

# Where pip finds this package: by the repository's address until the index has a release, then "".
_SOURCE = " @ git+https://github.com/what-a-token-costs/what-a-token-costs"


def install_command(extra: str) -> str:
    """The command that adds an extra of this package, `cpu` or `model`, as it works today."""
    return f"python -m pip install 'what-a-token-costs[{extra}]{_SOURCE}'"


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
