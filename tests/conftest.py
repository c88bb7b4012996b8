"""Shared by all tests: shapes in signatures are checked at run time, and torch uses one thread."""

import os
import sys
from importlib.machinery import PathFinder

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts; two workers share the machine

import pytest
from jaxtyping import install_import_hook

# Before anything of companion is imported: every call of an annotated function is checked from here on.
install_import_hook("companion", "typecheck.check")  # tests/helpers/typecheck.py
KERNELS = {
    *(f"companion.kernels.{folder}.kernel" for folder in ("append", "copy", "decode", "moe")),
    "companion.kernels.decode.tiles",
    "companion.kernels.cpu.attention",
    "companion.kernels.cpu.loops",
}


class AsTheyAre:
    """Modules of kernels are found before the hook sees them: Triton and Numba read their functions."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, path, target) if name in KERNELS else None


sys.meta_path.insert(0, AsTheyAre)


@pytest.fixture(scope="session")
def smollm2():
    """The real model, (decoder, tokenizer), loaded once per worker when a test first asks for it."""
    from companion.model import load

    return load("smollm2-135m")


@pytest.fixture
def taken(monkeypatch):
    """Rows of every decode step that went the compiled way; its attention in parts of one tile."""
    from companion.kernels import cpu as cpu_rows
    from companion.model import compiled

    seen = []

    def counted(x, *args, **kwargs):
        seen.append(len(x))
        return cpu_rows.step(x, *args, **kwargs)

    monkeypatch.setattr(compiled, "step", counted)
    monkeypatch.setattr(cpu_rows, "LEAST_TILES", 1)
    return seen
