"""Whole models, the ranks that share them, and what one process makes of the same tokens."""

import parallel_ranks
import pytest
import torch
from architectures import tiny

from companion.cost import ModelSpec
from companion.parallel import run

# Fewer key-value heads than four ranks, biases, sinks, windows, experts, a latent. The other architectures
# are split over threads, in test_all_architectures.py.
TENSOR = ("llama", "gpt_oss", "mixtral", "deepseek_v3")
EXPERT = ("gpt_oss", "mixtral", "deepseek_v3")


@pytest.fixture(scope="session")
def whole():
    """architecture -> (spec, state dict in float64)."""
    hf = {name: tiny(name).double() for name in TENSOR}
    return {n: (ModelSpec.from_config(m.config.to_dict()), dict(m.state_dict())) for n, m in hf.items()}


@pytest.fixture(scope="session")
def one(whole):
    """(architecture, dtype, seed) -> what one process gives, by the same functions."""
    done = {}

    def get(name, dtype, seed=0):
        if (name, dtype, seed) not in done:
            done[name, dtype, seed] = parallel_ranks.logits(*whole[name], dtype=dtype, seed=seed)
        return done[name, dtype, seed]

    return get


@pytest.fixture(scope="session")
def four(whole):
    """What each of four processes saw: tensor 4, expert 4, both 2 x 2, and the bare exchanges."""
    return run(4, parallel_ranks.everything, whole, EXPERT, timeout=60.0)


@pytest.fixture(scope="session")
def two(four):
    """The same of the first two, who were a group of their own: starting processes is what takes the time."""
    return [result["two"] for result in four[:2]]


DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5}
