"""Shared by all tests: shapes in signatures are checked at run time, and torch uses one thread."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts; two workers share the machine

import pytest
from jaxtyping import install_import_hook

# Before anything of companion is imported: every call of an annotated function is checked from here on.
install_import_hook("companion", "typecheck.check")  # tests/typecheck.py


@pytest.fixture(scope="session")
def smollm2():
    """The real model, (decoder, tokenizer), loaded once per worker when a test first asks for it."""
    from companion.model import load

    return load("smollm2-135m")
