"""Kernels are tested in Triton's interpreter. It is chosen for the whole process, so these tests have one of
their own: `python -m pytest tests/kernels -n 2`. In a process that has already imported Triton (transformers
does) the choice fails, and so does the run.
"""

from companion.kernels import interpret

interpret()
