"""Numba's threads, for the compiled loops: started when first needed, and as many at work as torch has."""

import functools
import threading

import torch

from ..mode import need_numba

_one_at_a_time = threading.Lock()  # not every kind of threads that Numba may use bears two callers


@functools.cache
def numba():
    """Numba, with its threads running. Raises ImportError where it is missing, or refuses this numpy."""
    need_numba("a compiled loop")
    import numba

    before = torch.get_num_threads()
    numba.get_num_threads()  # starts them; loops that come from the disk are called through them
    torch.set_num_threads(before)  # which OpenMP, that both share, has just been told otherwise
    return numba


class threads:
    """`with threads() as n`: compiled loops run on n threads, and nobody else's meanwhile."""

    def __enter__(self) -> int:
        found = numba()
        _one_at_a_time.acquire()
        self.before = found.get_num_threads()
        n = min(found.config.NUMBA_NUM_THREADS, torch.get_num_threads())
        found.set_num_threads(n)
        return n

    def __exit__(self, *error) -> None:
        numba().set_num_threads(self.before)
        _one_at_a_time.release()
