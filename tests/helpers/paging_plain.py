"""companion.paging as a user imports it: without the run-time checks of annotations that the tests install.

A wrong type then reaches the code itself, which has to answer with a ValueError of its own.
"""

import importlib
import sys
import types
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "companion"


def load():
    if "plain_companion" not in sys.modules:
        package = sys.modules["plain_companion"] = types.ModuleType("plain_companion")
        package.__path__ = [str(PACKAGE)]
    return importlib.import_module("plain_companion.paging")


def pool_state(pool):
    """Everything a pool knows, the free order included."""
    return (
        list(pool._refs)[: pool._used],
        list(pool._kept)[: pool._used],
        list(pool._empty),
        pool.eviction_order(),
        pool._used,
        pool.num_free,
    )


def index_state(index):
    return (
        {b: (e.number, e.parent, e.tokens, e.extra) for b, e in index._by_block.items()},
        {d: (e.number, list(e.blocks)) for d, e in index._by_digest.items()},
        index._made,
    )


def manager_state(manager):
    sequences = [
        (s.tokens.tolist(), s.extra, s.shared, s.registered, s.table.ids[:], s.table.length, s.table.freed)
        for s in manager.sequences
    ]
    return pool_state(manager.pool), index_state(manager.index), sequences, manager.usage()
