"""Shared by all tests: shapes in signatures are checked at run time, and torch uses one thread."""

import ast
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts; two workers share the machine

import pytest
from jaxtyping import _import_hook, install_import_hook

# Kernels are no Python functions: Triton and Numba read them, and the hook has to pass over them.
_unchecked, KERNELS = _import_hook._is_no_type_check, ("triton.jit", "njit", "compiled", "intrinsic")
_import_hook._is_no_type_check = lambda node: _unchecked(node) or ast.unparse(node).startswith(KERNELS)
# Before anything of companion is imported: every call of an annotated function is checked from here on.
install_import_hook("companion", "typecheck.check")  # tests/typecheck.py


@pytest.fixture(scope="session")
def smollm2():
    """The real model, (decoder, tokenizer), loaded once per worker when a test first asks for it."""
    from companion.model import load

    return load("smollm2-135m")


@pytest.fixture
def taken(monkeypatch):
    """Rows of every decode step that went the compiled way; its attention in parts of one tile."""
    from companion.kernels.cpu import rows as cpu_rows
    from companion.model import compiled

    seen = []

    def counted(x, *args, **kwargs):
        seen.append(len(x))
        return cpu_rows.step(x, *args, **kwargs)

    monkeypatch.setattr(compiled, "step", counted)
    monkeypatch.setattr(cpu_rows, "LEAST_TILES", 1)
    return seen
