"""Kernels are tested in Triton's interpreter. It is chosen for the whole process, so these tests have one of
their own: `python -m pytest tests/kernels -n 2`. In a process that has already imported Triton (transformers
does) the choice fails, and so does the run.
"""

import numpy as np
import pytest

from companion.kernels import interpret

interpret()


@pytest.fixture
def even_dots(monkeypatch):
    """tl.dot sums each element in one order, as a tensor core does, wherever it stands in its tile.

    The interpreter asks numpy, whose library may sum the rows at a tile's edge in another order than those in
    its middle: on some CPUs a row's last bits then depend on its neighbours.
    """

    def matmul(a, b, dtype=None):
        return np.multiply(a[:, None, :], b.T[None], dtype=dtype).sum(axis=-1, dtype=dtype)

    monkeypatch.setattr(np, "matmul", matmul)
