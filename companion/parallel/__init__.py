"""One model on many processes: tensor parallel, expert parallel, and every byte between them counted.

A program for `torchrun --standalone --nproc-per-node 4 program.py`; without torchrun it is a group of one:

    from companion.parallel import join, shard
    group = join(timeout=30.0)
    decoder = shard(spec, weights, tensor=group)     # this rank's part; the logits are the whole model's
    logits = decoder(ids)
    print(group.by_purpose)                          # what this rank has handed to collectives

`python -m companion.parallel --help` is such a program. In a notebook or a test, `run(4, fn, ...)` starts the
processes. What the bytes should be is `companion.cost.parallel_bytes`.
"""

from .collectives import Call, Group, RankLost, join, leave, mesh
from .launch import RanksFailed, run
from .layers import ExpertParallel, cache_nbytes, exchanged_experts, shard
from .weights import RandomWeights, Slices

__all__ = [
    "Call",
    "ExpertParallel",
    "Group",
    "RandomWeights",
    "RankLost",
    "RanksFailed",
    "Slices",
    "cache_nbytes",
    "exchanged_experts",
    "join",
    "leave",
    "mesh",
    "run",
    "shard",
]
