"""Every architecture and every way in which checkpoints name their tensors, split over threads.

Threads cannot die or stall one by one, so processes have their own tests; but they need no start, and what is
cut out of which tensor does not depend on who carries the sums.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import parallel_ranks
import pytest
import torch
from architectures import TINY, tiny

from companion.cost import ModelSpec, parallel_bytes
from companion.parallel import Group, RandomWeights

SPARSE = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe")


class Together(Group):
    """Ranks that are threads and see each other's tensors."""

    def __init__(self, rank, size, room):
        super().__init__()
        self.rank, self.size, self.room = rank, size, room

    def all_seen(self, mine):
        seen, barrier = self.room
        seen[self.rank] = mine
        barrier.wait(30)
        everyone = list(seen)
        barrier.wait(30)
        return everyone

    def all_reduce(self, x, what=""):
        self._count("all_reduce", x.nbytes, x.nbytes, x.nbytes, what)
        return sum(self.all_seen(x))

    def all_to_all(self, x, send, receive, what=""):
        self._count("all_to_all", x.nbytes, 0, 0, what)
        everyone = self.all_seen(x.split(list(send)))
        came = [pieces[self.rank] for pieces in everyone]
        assert [len(c) for c in came] == list(receive)
        return torch.cat(came)


def together(size, work):
    """work(group) on `size` threads; (results by rank, groups)."""
    room = [None] * size, threading.Barrier(size)
    groups = [Together(rank, size, room) for rank in range(size)]

    def guarded(group):
        try:
            return work(group)
        except BaseException:
            room[1].abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, groups)), groups


def built(name, **changes):
    hf = tiny(name, **changes).double()
    return ModelSpec.from_config(hf.config.to_dict()), dict(hf.state_dict())


def check(spec, weights, **ranks):
    """Split over `tensor` or `expert` ranks, it gives the logits of one, and the bytes predicted."""
    ((split, size),) = ranks.items()

    def work(group):
        seed = group.rank if split == "expert" else 0
        return parallel_ranks.logits(spec, weights, dtype=torch.float64, seed=seed, **{split: group})

    results, groups = together(size, work)
    for rank, got in enumerate(results):
        seed = rank if split == "expert" else 0
        want = parallel_ranks.logits(spec, weights, dtype=torch.float64, seed=seed)
        for g, w in zip(got, want):
            torch.testing.assert_close(g, w, rtol=0, atol=1e-12)
    tokens = [2 * n for n in (9, *parallel_ranks.STEPS)]
    wanted = size * sum(parallel_bytes(spec, tokens=n, dtype=64, **ranks).payload for n in tokens)
    assert sum(g.payload for g in groups) == wanted > 0


@pytest.mark.parametrize("name", TINY)
def test_heads_and_widths_are_cut_right(name):
    check(*built(name), tensor=4)


@pytest.mark.parametrize("name", SPARSE)
def test_experts_are_shared_out_right(name):
    check(*built(name), expert=4)


def test_one_expert_to_a_rank():
    check(*built("mixtral"), expert=8)


@pytest.mark.parametrize("split", ["tensor", "expert"])
@pytest.mark.parametrize(
    "name, changes",
    [
        ("deepseek_v2", {"q_lora_rank": None}),  # queries straight from the stream
        ("deepseek_v3", {"attention_bias": True}),
        ("llama", {"num_key_value_heads": 1}),  # one head for everyone
        ("llama", {"tie_word_embeddings": True}),
    ],
)
def test_variants(name, changes, split):
    if name == "llama" and split == "expert":
        with pytest.raises(ValueError, match="expert must be 1 .*, got 2"):
            check(*built(name, **changes), expert=2)
    else:
        check(*built(name, **changes), **{split: 4})


@pytest.mark.parametrize("split", ["tensor", "expert"])
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_experts_by_name_one_by_one(name, split):
    """As in the published files: a tensor per expert, and for Mixtral its own names w1, w2, w3."""
    spec, _ = built(name)
    weights = RandomWeights(spec, 5, dtype=torch.float64)
    check(spec, weights, **{split: 2})
    if name == "mixtral":
        own = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", ".mlp.": ".block_sparse_moe."}
        renamed = {}
        for n, w in weights.items():
            for a, b in own.items():
                n = n.replace(a, b)
            renamed[n] = w
        check(spec, renamed, **{split: 2})


def test_a_layer_of_experts_that_are_all_on_one_rank():
    """Routing that sends everything to experts 0 and 1: every other rank has tokens and no rows."""
    spec, weights = built("mixtral")
    spec = replace(spec, moe=replace(spec.moe, router_bias=True))
    bias = torch.zeros(8, dtype=torch.float64)
    bias[:2] = 1e3
    weights |= {f"model.layers.{i}.mlp.gate.bias": bias for i in range(spec.layers)}
    check(spec, weights, expert=4)
